"""Flags: what is taken, what is derived, and what each refusal says. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang.srt.configs.speculative_args import parse_threshold, resolve_shape
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_checks import replacements, shape_warning
from sglang.srt.utils.flags import ServerArgsError, flags_of, option_name
from sglang.srt.utils.gpu import has_gpu
from sglang.srt.utils.upstream_flags import refused_flags

EAGLE = "--speculative-algorithm EAGLE3 --speculative-draft-model-path d"


def resolved(line: str, architecture: str = "Qwen3ForCausalLM") -> ServerArgs:
    return ServerArgs.from_command_line(["--model-path", "m", *line.split()]).resolve(architecture)


def test_defaults() -> None:
    args = resolved("")
    assert (args.host, args.port, args.stream_interval, args.page_size) == ("127.0.0.1", 30000, 1, 1)
    assert args.tokenizer_path == args.served_model_name == "m"
    assert args.attention_backend == "torch_native"
    assert args.speculative_algorithm is None and args.speculative_num_steps is None


def test_the_device_decides_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = executor_args(resolved(""))
    assert (on_cpu.device, on_cpu.attention_backend, on_cpu.mem_fraction_static) == (
        "cpu", "torch_native", 0.6,
    )  # fmt: skip
    monkeypatch.setattr("sglang.srt.server_args.has_gpu", lambda: True)
    on_gpu = executor_args(resolved(""))
    assert (on_gpu.device, on_gpu.attention_backend, on_gpu.mem_fraction_static) == ("cuda", "triton", 0.88)
    assert on_gpu.cuda_graph_max_bs is on_gpu.cuda_graph_bs is on_gpu.chunked_prefill_size is None
    assert executor_args(resolved("--device cpu")).attention_backend == "torch_native"


def test_graph_flags_reach_the_executor() -> None:
    line = "--device cuda --cuda-graph-max-bs-decode 40 --cuda-graph-bs 1 8 64 --disable-cuda-graph-padding"
    args = executor_args(resolved(f"{line} --chunked-prefill-size 4096 --max-prefill-tokens 5000"))
    assert (args.cuda_graph_max_bs, args.cuda_graph_bs) == (40, (1, 8, 64))
    assert args.disable_cuda_graph_padding and not args.disable_cuda_graph
    assert (args.chunked_prefill_size, args.max_prefill_tokens) == (4096, 5000)
    assert executor_args(resolved("--device cuda --disable-decode-cuda-graph")).disable_cuda_graph
    given = ServerArgs.from_keywords(model_path="m", device="cuda", cuda_graph_bs=[1, 2])
    assert given.resolve(None).cuda_graph_bs == (1, 2)


@pytest.mark.parametrize(
    "environ, has_file, torch_version, expected",
    [
        ({}, True, "2.11.0+cu130", True),
        ({}, True, "2.11.0", True),
        ({"CUDA_VISIBLE_DEVICES": "1"}, True, "2.11.0", True),
        ({}, False, "2.11.0", False),
        ({}, True, "2.13.0+cpu", False),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, "2.11.0", False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True, "2.11.0", False),
    ],
)
def test_a_gpu_is_seen_without_torch(
    tmp_path: Path, environ: dict[str, str], has_file: bool, torch_version: str, expected: bool
) -> None:
    device_file = tmp_path / "nvidiactl"
    if has_file:
        device_file.touch()
    assert has_gpu(environ, device_file, torch_version) is expected


def test_every_field_is_a_flag_with_help() -> None:
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    assert set(flags_of(ServerArgs)) == fields
    assert all(row.help for row, _ in flags_of(ServerArgs).values())


def test_no_flag_is_both_taken_and_refused() -> None:
    taken = {o for name, (row, _) in flags_of(ServerArgs).items() for o in (option_name(name), *row.aliases)}
    assert not taken & set(refused_flags())


def test_flags_of_upstream_are_refused_by_name() -> None:
    for option, reason in refused_flags().items():
        with pytest.raises(ServerArgsError, match=re.escape(f"SGLang has {option}; this server does not: ")):
            resolved(f"{option} 1")
        assert reason.endswith(("leave it out", "backend", "dtype")) or ":" in reason
    with pytest.raises(ServerArgsError, match="quantization-param-path"):
        resolved("--quantization-param-path=x")


def test_aliases() -> None:
    args = resolved("--model other --tp 1 --dp 1 --ep 1 --pp 1")
    assert (args.model_path, args.tp_size) == ("other", 1)
    args = resolved("--speculative-algorithm eagle3 --speculative-draft-model x")
    assert (args.speculative_algorithm, args.speculative_draft_model_path) == ("EAGLE3", "x")


def test_what_needs_a_gpu_says_what_is_used_instead() -> None:
    line = "--tp 2 --cuda-graph-max-bs 128 --cuda-graph-bs 1 2 --attention-backend flashinfer"
    line += " --disable-custom-all-reduce --enable-flashinfer-allreduce-fusion"
    given = ServerArgs.from_command_line(["--model-path", "m", "--device", "cpu", *line.split()])
    args = given.resolve("LlamaForCausalLM")
    assert (args.tp_size, args.attention_backend) == (2, "torch_native")
    lines = replacements(given, args)
    by_gloo = "sums over the 2 ranks are made by Gloo, through the loopback interface"
    assert lines[2:] == [
        "--attention-backend flashinfer is for GPUs; torch_native is used",
        f"--disable-custom-all-reduce: {by_gloo}",
        f"--enable-flashinfer-allreduce-fusion: {by_gloo}",
    ]
    assert [line.split(":")[0] for line in lines[:2]] == ["--cuda-graph-max-bs", "--cuda-graph-bs"]
    assert replacements(given, dataclasses.replace(args, device="cuda")) == []
    alone = replacements(dataclasses.replace(given, tp_size=1), args)
    assert [line.split(": ")[1] for line in alone[3:]] == ["there is one rank, and nothing to sum"] * 2
    assert replacements(ServerArgs(), ServerArgs(device="cpu")) == []


@pytest.mark.parametrize("option", ["--fp4-gemm-backend", "--moe-runner-backend"])
def test_inputs_in_4_bits_are_for_gpus(option: str) -> None:
    field = option.removeprefix("--").replace("-", "_")
    for name in ("auto", "triton"):
        line = ["--model-path", "m", "--device", "cpu", option, name]
        given = ServerArgs.from_command_line(line)
        args = given.resolve("LlamaForCausalLM")
        assert getattr(args, field) == getattr(executor_args(args), field) == name
        said = f"{option} triton is for GPUs; on a CPU weights are dequantised as they are loaded"
        assert replacements(given, args) == ([said] if name == "triton" else [])
    with pytest.raises(ServerArgsError, match=f"{option} flashinfer_cutlass needs a GPU of SM100 or SM120"):
        resolved(f"{option} flashinfer_cutlass --device cpu")
    for name in ("flashinfer_trtllm", "flashinfer_cudnn", "marlin", "cutlass", "deep_gemm"):
        with pytest.raises(
            ServerArgsError, match=f"^{option} {name} is not one of: auto, triton, flashinfer"
        ):
            resolved(f"{option} {name}")
    on_gpu = ServerArgs(model_path="m", device="cuda", **{field: "flashinfer_cutlass"}).resolve("x")
    assert getattr(executor_args(on_gpu), field) == "flashinfer_cutlass"


@pytest.mark.parametrize(
    "given,kind,shape",
    [
        ("EAGLE3 --speculative-draft-model-path d", "EAGLE3", (5, 4, 8)),
        ("EAGLE", "NEXTN", (3, 1, 4)),
        ("nextn --speculative-draft-model-path d", "NEXTN", (3, 1, 4)),
        ("STANDALONE --speculative-draft-model-path d", "STANDALONE", (3, 1, 4)),
        ("NGRAM", "NGRAM", (5, 1, 6)),
        ("NGRAM --speculative-num-steps 2", "NGRAM", (2, 1, 3)),
    ],
)
def test_kinds_of_drafter(given: str, kind: str, shape: tuple[int, int, int]) -> None:
    args = resolved(f"--speculative-algorithm {given}", "LlamaForCausalLM")
    found = args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens
    assert (args.speculative_algorithm, found) == (kind, shape)
    assert executor_args(args).draft_kind == kind


@pytest.mark.parametrize(
    "line, words",
    [
        ("--tmp-size 1", "did you mean --tp-size"),
        ("--zzzz", "--help"),
        ("stray", "unexpected argument stray"),
        ("--port x", "--port.*whole number.*'x'"),
        ("--random-seed 99999999999999999999", "--random-seed.*64 bits"),
        ("--api-key=", "--api-key is empty"),
        ("--speculative-algorithm=", "--speculative-algorithm is empty"),
        ("--enable-metrics=1", "--enable-metrics takes no value"),
        ("--enable-something", "--help"),
        ("--port 70000", "--port.*65535"),
        ("--load-format npcache", "--load-format.*safetensors"),
        ("--quantization squeezellm", "--quantization.*awq.*modelopt_fp4"),
        ("--speculative-draft-model-quantization fp8", "quantization needs a drafter"),
        ("--dp 8", "--dp-size 8 is not supported yet"),
        ("--tp 0", "--tp-size must be from 1 to 64"),
        ("--attention-backend magic", "magic is unknown"),
        ("--device cuda --attention-backend torch_native", "torch_native is for --device cpu: use triton"),
        ("--attention-backend fa3", "fa3 needs a kernel"),
        ("--disable-cuda-graph", "--disable-cuda-graph: there are no CUDA graphs on a CPU"),
        ("--disable-cuda-graph-padding", "--disable-cuda-graph-padding: there are no CUDA graphs"),
        ("--device cuda --cuda-graph-max-bs 0", "--cuda-graph-max-bs must be at least 1"),
        ("--device cuda --cuda-graph-bs 4 0", "--cuda-graph-bs takes batch sizes of at least 1"),
        ("--device cuda --cuda-graph-bs", "--cuda-graph-bs.*at least one"),
        ("--device cuda --cuda-graph-bs 4 x", "--cuda-graph-bs.*whole number.*'x'"),
        ("--device cuda --cuda-graph-bs 4 8 --cuda-graph-max-bs 2", "--cuda-graph-bs 4 is beyond"),
        ("--device cuda --disable-cuda-graph --cuda-graph-bs 4", "--cuda-graph-bs changes nothing with"),
        ("--device cuda --disable-cuda-graph --disable-cuda-graph-padding", "padding changes nothing with"),
        ("--device tpu", "--device.*cpu.*cuda"),
        ("--page-size 0", "--page-size"),
        ("--context-length 1", "--context-length must be at least 2"),
        ("--max-running-requests 1000000000", "--max-running-requests must be at most 8192"),
        ("--page-size 100000000000", "--page-size must be at most 1024"),
        ("--chunked-prefill-size 0", "--chunked-prefill-size"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static"),
        ("--speculative-algorithm DFLASH", "DFLASH is not supported yet; supported: EAGLE3 and STANDALONE"),
        ("--speculative-algorithm STANDALONE", "STANDALONE needs --speculative-draft-model-path"),
        ("--speculative-algorithm NGRAM --speculative-draft-model-path d", "no use with.*NGRAM"),
        (
            "--speculative-algorithm ngram --speculative-num-steps 3 --speculative-eagle-topk 2",
            "--speculative-eagle-topk 2 is not supported with --speculative-algorithm NGRAM",
        ),
        ("--speculative-algorithm FOO", "FOO is unknown"),
        ("--speculative-algorithm EAGLE3", "--speculative-draft-model-path"),
        ("--speculative-num-steps 3", "--speculative-num-steps needs a drafter"),
        ("--speculative-disable-bs-threshold 3", "--speculative-algorithm EAGLE3"),
        (f"{EAGLE} --speculative-disable-bs-threshold -1", "whole number from 0"),
        (f"{EAGLE} --speculative-disable-bs-threshold automatic", "whole number from 0.*or auto"),
        (
            f"{EAGLE} --speculative-disable-bs-threshold auto --speculative-bs-schedule 1-:3",
            "threshold auto and --speculative-bs-schedule both say",
        ),
        ("--speculative-bs-schedule 1-:3", "--speculative-bs-schedule needs a drafter"),
        ("--speculative-auto-table x.json", "--speculative-auto-table needs a drafter"),
        (f"{EAGLE} --speculative-adaptive", "SGLang has --speculative-adaptive.*threshold auto"),
        (f"{EAGLE} --speculative-disable-bs-threshold 2.5", "whole number from 0"),
        (f"{EAGLE} --speculative-disable-bs-threshold 99999999999999999999", "whole number from 0"),
        (
            f"{EAGLE} --speculative-disable-bs-threshold 9 --speculative-capture-max-bs 8",
            "capture-max-bs 8 to at least",
        ),
        (f"{EAGLE} --speculative-num-steps 0", "threshold 0"),
        (f"{EAGLE} --speculative-eagle-topk 2", "need --speculative-num-steps"),
        (f"{EAGLE} --speculative-num-steps 2 --speculative-eagle-topk 4", "from 2 to 21"),
        (f"{EAGLE} --speculative-accept-threshold-single 0.5", "verification is exact"),
        (f"{EAGLE} --speculative-use-rejection-sampling", "verification is exact"),
    ],
)
def test_refusals(line: str, words: str) -> None:
    with pytest.raises(ServerArgsError, match=words) as caught:
        resolved(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given, architecture, shape",
    [
        ((None, None, None), "LlamaForCausalLM", (5, 4, 8)),
        ((None, None, None), "Qwen2ForCausalLM", (3, 1, 4)),
        ((3, None, None), "LlamaForCausalLM", (3, 1, 4)),
        ((3, 1, 4), "LlamaForCausalLM", (3, 1, 4)),
        ((2, 1, 9), "LlamaForCausalLM", (2, 1, 3)),
        ((2, 4, 16), "LlamaForCausalLM", (2, 4, 16)),
        ((2, 4, 21), "LlamaForCausalLM", (2, 4, 21)),
    ],
)
def test_shapes(given: tuple[Any, Any, Any], architecture: str, shape: tuple[int, int, int]) -> None:
    found = resolve_shape(*given, architecture)
    assert (found.num_steps, found.eagle_topk, found.num_draft_tokens) == shape
    assert bool(found.warning) == (given[2] not in (None, shape[2]))


@pytest.mark.parametrize(
    "shape", [(2, 4, 22), (2, 4, 1), (2, 0, 3), (0, 1, 1), (None, None, 4), (33, 1, 34), (8, 8, 65)]
)
def test_shapes_that_can_not_be(shape: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ServerArgsError):
        resolve_shape(*shape, "LlamaForCausalLM")


def test_a_changed_shape_is_said() -> None:
    args = ServerArgs.from_command_line(
        f"--model m {EAGLE} --speculative-num-steps 2 --speculative-num-draft-tokens 9".split()
    )
    assert "changed to 3" in shape_warning(args, None)
    assert shape_warning(ServerArgs(), None) == ""


def test_threshold_values() -> None:
    assert [parse_threshold(value) for value in (None, "0", 7, "12", "auto")] == [None, 0, 7, 12, "auto"]
    for wrong in (True, "", "1e3", -2, 2.0, "Auto"):
        with pytest.raises(ServerArgsError):
            parse_threshold(wrong)  # type: ignore[arg-type]


def test_keywords_are_checked_as_flags_are() -> None:
    args = ServerArgs.from_keywords(model_path="m", mem_fraction_static=1 / 2, page_size=16)
    assert args.page_size == 16
    for values, words in (
        ({"page_siz": 1}, "did you mean page_size"),
        ({"page_size": "1"}, "page_size must be of type int"),
        ({"page_size": True}, "page_size must be of type int"),
        ({"page_size": 2**70}, "64 bits"),
        ({"model_path": ""}, "--model-path is empty"),
        ({"cuda_graph_bs": 4}, "cuda_graph_bs must be a list of type int"),
        ({"cuda_graph_bs": [4, "8"]}, "cuda_graph_bs must be of type int"),
        ({"load_format": "npcache"}, "load_format"),
        ({"quantization": "squeezellm"}, "quantization.*modelopt_fp4"),
        ({"speculative_disable_bs_threshold": -1}, "whole number"),
    ):
        with pytest.raises(ServerArgsError, match=words):
            ServerArgs.from_keywords(**values)


def test_it_crosses_a_process_boundary() -> None:
    args = resolved(f"{EAGLE} --mem-fraction-static 0.5 --api-key k --device cuda --cuda-graph-bs 1 2")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(args), type=ServerArgs) == args
    assert args.public_dict()["api_key"] == "***"
    args = resolved(f"{EAGLE} --speculative-disable-bs-threshold auto --speculative-auto-table t.json")
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(args), type=ServerArgs)
    assert again == args and again.speculative_disable_bs_threshold == "auto"


def test_help_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        ServerArgs.from_command_line(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(option_name(name) in text for name in flags_of(ServerArgs))
