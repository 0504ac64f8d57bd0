"""The CUDA build's order and wiring on a CPU: memory and capture are fakes, the kernels their references.

Run alone: ``pytest THIS_FILE``.
"""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.fake_flashinfer import fake_flashinfer
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.replaying_capture import ReplayingCapture
from helpers.tiny_executor import draft_folder, drafter_folder, target_folder, tiny_executor

from sgl_kernel.linear.variants import ROW_CLASSES, ChoiceTable
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.managers import executor_build
from sglang.srt.managers import executor_build_cuda as build
from sglang.srt.managers.executor_build_attention import check_backend
from sglang.srt.managers.executor_build_models import ExecutorArgsError, load_models
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.mem_cache.mla_pool import MLAKVPool
from sglang.srt.model_executor import graph_sizes
from sglang.srt.model_executor.config import max_positions
from sglang.srt.model_executor.dry_run import small_prefills
from sglang.srt.model_executor.graph_sizes import GraphSizes
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.measure_costs import (
    CPU_EFFORT,
    HostStopwatch,
    captured_order,
    measure_costs,
)
from sglang.srt.model_executor.memory import BYTES_A_GRAPH, OutOfMemoryError
from sglang.srt.model_executor.split_graphs import SplitGraphs
from sglang.srt.model_executor.step_plan import ExecutorInfo, GraphSet, SpecShape, StepPlan

CPU = torch.device("cpu")
TOTAL = 1 << 30


class Capture(ReplayingCapture):
    def __init__(self, device: torch.device) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def fake_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU of 1 GiB, of which this process has 100 MiB. Returns pages of the pools alive, at each query."""
    alive: list[int] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        gc.collect()
        alive.append(sum(type(found) is MHAKVPool for found in gc.get_objects()))
        return TOTAL - (100 << 20), TOTAL

    fakes = SimpleNamespace(
        get_device_name=lambda device: "fake",
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda device: None,
        memory_reserved=lambda device: 100 << 20,
        max_memory_reserved=lambda device: 150 << 20,
        mem_get_info=mem_get_info,
    )
    for name, fake in vars(fakes).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(build, "CudaCapture", Capture)
    monkeypatch.setattr(build, "compile_ahead", lambda num_threads: nullcontext())
    return alive


def arguments(shape: tuple[int, int, int] | None, **changes: object) -> ExecutorArgs:
    values: dict[str, object] = {
        "model_path": str(target_folder()),
        "dtype": "float32",
        "device": "cuda",
        "attention_backend": "triton",
        "mem_fraction_static": 0.88,
        "max_running_requests": 6,
        "context_length": 200,
        "page_size": 4,
    }
    if shape is not None:
        steps, topk, tokens = shape
        draft = str(draft_folder())
        values |= {
            "draft_model_path": draft, "num_steps": steps, "topk": topk, "num_draft_tokens": tokens,
        }  # fmt: skip
    return ExecutorArgs(**(values | changes))  # type: ignore[arg-type]


def built(args: ExecutorArgs) -> tuple[InProcessExecutor, tuple[GraphSet, ...]]:
    models = load_models(args, CPU)
    worker, graphs = build.build_cuda(args, models, None, chunk=64)
    config = worker.config
    info = ExecutorInfo(
        config.num_slots, config.num_pages, config.page_size, config.context_len, config.vocab_size,
        config.spec, config.max_spec_rows,
    )  # fmt: skip
    return InProcessExecutor(lambda: (worker, info)), graphs


@pytest.mark.parametrize("shape", [None, pytest.param((3, 1, 4), marks=pytest.mark.long), (2, 4, 16)])
def test_what_is_built_puts_out_what_a_cpu_does(
    shape: tuple[int, int, int] | None, fake_device: list[int]
) -> None:
    gc.collect()  # pools that earlier tests left
    before = sum(type(found) is MHAKVPool for found in gc.get_objects())
    executor, graphs = built(arguments(shape, masked_steps=True))
    assert fake_device == [before], "the trial's pools are gone when the rest is measured"
    spec = SpecShape(*shape) if shape else None
    assert executor.info.num_pages == 6 * -(-max_positions(200, spec) // 4)
    assert [g.sizes for g in graphs] == [(1, 2, 4, 6)] * (2 if shape else 1)
    texts = []
    for one in (executor, tiny_executor(shape, dtype="float32", page_size=4, context_length=200)):
        driver = PlanDriver(one)
        requests = [driver.add([5, 6, 7, 8 + i]) for i in range(5)]
        driver.generate(requests[:3], 9, shape[0] if shape else 0)
        driver.generate(requests, 14, 0)
        texts.append([request.output[:14] for request in requests])
    assert texts[0] == texts[1]
    assert executor.worker._decode_steps is not None and executor.worker._decode_steps._graphs is not None
    split = executor.worker._decode_steps._split
    assert isinstance(split, SplitGraphs)
    assert split.sizes.by_draft_len == {g.draft_len: (1, 2, 4, 6) for g in graphs}


@pytest.mark.parametrize("shape", [pytest.param((3, 1, 4), marks=pytest.mark.long), (2, 3, 6)])
def test_latent_models_and_their_drafters_are_built_too(shape: tuple[int, int, int]) -> None:
    family, drafter = "kimi-k2.5", "eagle3-mla"
    folders = {
        "model_path": str(target_folder(family)),
        "draft_model_path": str(drafter_folder(drafter, family)),
    }
    executor, graphs = built(arguments(shape, **folders))
    assert [g.draft_len for g in graphs] == [0, shape[0]]
    assert [type(pool) for pool in executor.worker.pools] == [MLAKVPool] * 2
    oracle = tiny_executor(shape, family, drafter=drafter, dtype="float32", page_size=4, context_length=200)
    texts = []
    for one in (executor, oracle):
        driver = PlanDriver(one)
        requests = [driver.add([5, 6, 7, 8 + i]) for i in range(5)]
        driver.generate(requests[:3], 9, shape[0])
        driver.generate(requests, 14, 0)
        texts.append([request.output[:14] for request in requests])
    assert texts[0] == texts[1]


def test_prompts_leave_the_draft_cache_that_a_cpu_leaves() -> None:
    pools, features = [], []
    on_cpu = tiny_executor((3, 1, 4), dtype="float32", page_size=4, context_length=200)
    for one in (built(arguments((3, 1, 4)))[0], on_cpu):
        driver = PlanDriver(one)
        first = driver.add([5, 6, 7, 8, 9, 10, 11], chunk=3)
        second = DrivenRequest(driver.free_slots.pop(), [3, 1, 4, 1, 5])
        driver.run(driver.plan([first], prefill=[(second, 0, 5)]), [first, second])
        pool = one.worker.pools[1]
        paged = pool.kv.view(-1, 4, *pool.kv.shape[2:])
        for request in (first, second):
            assert request.seq_len == (8 if request is first else 5)
            pools.append(paged[torch.tensor(request.pages)].flatten(0, 1)[: request.seq_len])
        features.append(one.worker.state.draft_feature[[first.slot, second.slot]])
    for ours, cpus in zip(pools[:2], pools[2:], strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, cpus, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*features, rtol=1e-4, atol=1e-5)


def test_sizes_and_rows_that_speculate_follow_the_arguments() -> None:
    chain = (3, 1, 4)
    assert built(arguments(chain, cuda_graph_max_bs=3))[0].info.max_spec_rows == 3
    executor, graphs = built(arguments(chain, capture_max_bs=2, cuda_graph_bs=(1, 4)))
    assert executor.info.max_spec_rows == 2
    assert [(g.draft_len, g.sizes) for g in graphs] == [(0, (1, 4)), (3, (1, 2))]
    executor, graphs = built(arguments(chain, disable_cuda_graph=True))
    assert graphs == () and executor.info.max_spec_rows == 6
    driver = PlanDriver(executor)
    assert driver.step([driver.add([1, 2])], 3).used_graph is False
    exact, _ = built(arguments(None, cuda_graph_bs=(2,), disable_cuda_graph_padding=True))
    driver = PlanDriver(exact)
    requests = [driver.add([1, 2]), driver.add([3])]
    assert driver.step(requests).used_graph is True and driver.step(requests[:1]).used_graph is False


@pytest.mark.parametrize("shape", [(3, 1, 4), (2, 4, 16)])
def test_every_draft_length_asked_for_has_its_graphs(shape: tuple[int, int, int]) -> None:
    wanted = ((1, None), (2, 3)) if shape[0] == 3 else ((1, 5), (2, None))
    executor, graphs = built(arguments(shape, spec_rows=wanted))
    sizes = {(3, 1, 4): {1: (1, 2, 4, 6), 2: (1, 2, 3)}, (2, 4, 16): {1: (1, 2, 4, 5), 2: (1, 2, 4, 6)}}
    assert {g.draft_len: g.sizes for g in graphs} == {0: (1, 2, 4, 6)} | sizes[shape]
    assert executor.info.max_spec_rows == 6, "of the length that goes furthest"
    texts = []
    for one in (executor, tiny_executor(shape, dtype="float32", page_size=4, context_length=200)):
        driver = PlanDriver(one)
        requests = [driver.add([5, 6, 7, 8 + i]) for i in range(3)]
        for draft_len in (1, 2, 0, 2, 1, 1):
            result = driver.step(requests, draft_len)
            assert result.used_graph is not False
        texts.append([request.output[:6] for request in requests])
    assert texts[0] == texts[1]


def test_captured_steps_are_timed_and_leave_the_state_alone() -> None:
    executor, graphs = built(arguments((3, 1, 4), spec_rows=((1, None), (3, 2))))
    driver = PlanDriver(executor)
    driver.generate([driver.add([5, 6, 7]), driver.add([8, 9])], 6)
    worker = executor.worker
    before = {n: v.clone() for n, v in vars(worker.state).items() if isinstance(v, torch.Tensor)}
    counts = worker.sampler.rules.states.token_counts.clone()  # type: ignore[attr-defined]
    effort = replace(CPU_EFFORT, repeats=1, long_len=32)
    costs = measure_costs(worker, captured_order(graphs), effort, HostStopwatch())
    assert [(c.draft_len, c.rows) for c in costs] == [
        (g.draft_len, rows) for g in sorted(graphs, key=lambda g: g.draft_len) for rows in g.sizes
    ]
    assert all(torch.equal(getattr(worker.state, name), value) for name, value in before.items())
    assert torch.equal(worker.sampler.rules.states.token_counts, counts)  # type: ignore[attr-defined]


def test_the_pool_leaves_room_for_graphs_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(TOTAL * 0.85) - 3 * BYTES_A_GRAPH)
    with pytest.raises(OutOfMemoryError, match="no request fits"):
        built(arguments(None, mem_fraction_static=0.85))
    wide = built(arguments(None, mem_fraction_static=0.85, cuda_graph_bs=(1,)))[0]
    assert wide.info.num_pages == 6 * 51


def test_the_largest_step_is_a_mixed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    largest = build.largest_prefill

    def noted(num_tokens: int, num_slots: int, context_len: int) -> StepPlan:
        tried.append(num_tokens)
        return largest(num_tokens, num_slots, context_len)

    monkeypatch.setattr(build, "largest_prefill", noted)
    built(arguments(None, chunked_prefill_size=50))
    assert tried == [50 + 6], "a chunk and all the rows that can decode beside it"


def test_what_has_no_kernel_is_refused() -> None:
    with pytest.raises(ExecutorArgsError, match="'torch_native' is not one of: triton, flashinfer"):
        built(arguments(None, attention_backend="torch_native"))


def test_trees_that_attention_has_no_room_for_are_refused() -> None:
    check_backend(arguments((5, 32, 64)))
    check_backend(arguments((1, 65, 64)))  # one level: nothing lies in scratch
    for shape in ((5, 33, 64), (2, 65, 64)):
        with pytest.raises(ExecutorArgsError, match=f"topk {shape[1]} with .* is too wide a tree on CUDA"):
            check_backend(arguments(shape))


@pytest.mark.parametrize(
    "sizes, spec, keys",
    [
        ({0: (1, 2, 4, 8, 16, 24, 32, 40)}, None, [(0, 1), (0, 4), (0, 16), (0, 32)]),
        ({0: (1, 2, 3, 8)}, None, [(0, 1), (0, 3), (0, 8)]),  # nothing of 4 or 16 rows
        ({0: (64,)}, None, []),
        ({0: (1, 2, 6), 3: (1, 2)}, SpecShape(3), [(0, 1), (3, 1), (3, 2)]),  # 4 and 8 tokens
    ],
)
def test_products_are_timed_for_the_most_rows_of_a_class(
    sizes: dict[int, tuple[int, ...]], spec: SpecShape | None, keys: list[tuple[int, int]]
) -> None:
    found = build.telling_keys(GraphSizes(sizes, pad=True), spec)
    assert [(key.draft_len, key.rows) for key in found] == keys


@pytest.mark.parametrize("family", [pytest.param("qwen3-moe", marks=pytest.mark.long), "gpt-oss"])
def test_steps_of_rows_with_draft_lengths_of_their_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for chains alone, and they put out what a CPU does."""
    monkeypatch.setattr(graph_sizes, "LEAST_RAGGED_ROWS", 4)
    changes = {"model_path": str(target_folder(family)), "draft_model_path": str(draft_folder(family))}
    wanted = arguments((3, 1, 4), spec_rows=((1, None), (3, None)), ragged_steps=True, **changes)
    for other in (
        {"ragged_steps": False},
        {"topk": 2, "num_draft_tokens": 8},
        {"disable_cuda_graph_padding": True},
    ):
        assert not build._may_be_ragged(replace(wanted, **other), load_models(wanted, CPU))
    executor, graphs = built(wanted)
    assert [g.ragged for g in graphs] == [
        (),
        ((4, 6), (6, 9)),
        ((4, 8), (4, 10), (4, 12), (6, 12), (6, 15), (6, 18)),
    ]
    texts = []
    for one in (executor, tiny_executor((3, 1, 4), family, dtype="float32", page_size=4, context_length=200)):
        driver = PlanDriver(one)
        requests = [driver.add([5, 6, 7, 8 + i]) for i in range(5)]
        results = []
        for draft_len, drafts in ((3, (0, 3, 1, 2, 0)), (1, (1, 0, 0, 1, 1)), (3, (3, 3, 0, 0, 3))):
            results.append(driver.run(driver.plan(requests, draft_len, row_drafts=drafts), requests))
        texts.append([result.tokens for result in results])
        if one is executor:
            assert [result.used_graph for result in results] == [True] * 3
    assert texts[0] == texts[1]


def test_latent_attention_has_no_rows_with_draft_lengths_of_their_own() -> None:
    args = arguments(None, ragged_steps=True)
    ordinary = load_models(args, CPU)
    latent = replace(ordinary.target.config, mla=object())
    models = SimpleNamespace(target=SimpleNamespace(config=latent), draft_model=None)
    assert build._may_be_ragged(args, ordinary) and not build._may_be_ragged(args, models)  # type: ignore[arg-type]


def test_choices_that_can_not_be_written_are_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ExecutorArgsError, match="--kernel-choices-file .* can't be written"):
        build._save_choices(ChoiceTable("d"), tmp_path)
    build._save_choices(ChoiceTable("d", {"a": "b"}), tmp_path / "choices.json")
    assert [file.name for file in tmp_path.iterdir()] == ["choices.json"]
    assert build._load_choices(tmp_path / "choices.json", "d").chosen == {"a": "b"}


def test_prefill_by_flashinfer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ExecutorArgsError, match=r"pip install flashinfer-python==\S+$"):
        check_backend(arguments(None, attention_backend="flashinfer"))
    package = fake_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    with pytest.raises(ExecutorArgsError, match="is for bfloat16 and float16, not torch.float32: use triton"):
        built(arguments(None, attention_backend="flashinfer"))
    caplog.set_level("INFO")
    texts = []
    for name in ("triton", "flashinfer"):
        executor, _ = built(
            arguments((3, 1, 4), attention_backend=name, dtype="float16", disable_cuda_graph=True)
        )
        driver = PlanDriver(executor)
        requests = [driver.add([5, 6, 7, 8 + i], chunk=3) for i in range(3)]
        driver.generate(requests, 9, 3)
        texts.append([request.output for request in requests])
    assert texts[0] == texts[1]
    wrappers = package.BatchPrefillWithPagedKVCacheWrapper.made
    assert len(wrappers) == 2 and wrappers[0].workspace is wrappers[1].workspace, "for trial and server"
    # The build of its kernels, the trial's largest step and small ones, two chunks of each prompt.
    assert sum(len(w.plans) for w in wrappers) == 2 + len(small_prefills(ROW_CLASSES, 6, 200)) + 3 * 2
    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("attention: prefill by Fl")]
    assert "decode and verification by our own kernels" in line
    with pytest.raises(ExecutorArgsError, match="float64 is for the CPU"):
        load_models(arguments(None, dtype="float64"), torch.device("cuda"))


@pytest.mark.parametrize("missing", ["sgl_kernel", "triton"])
def test_a_package_that_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = executor_build.find_spec
    monkeypatch.setattr(executor_build, "find_spec", lambda name: None if name == missing else find("torch"))
    with pytest.raises(ExecutorArgsError, match=rf"needs the package {missing}: pip install './sgl-kernel"):
        executor_build.build_executor(arguments(None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so() -> None:
    with pytest.raises(ExecutorArgsError, match="PyTorch finds no NVIDIA GPU; use --device cpu"):
        build.start_device()
