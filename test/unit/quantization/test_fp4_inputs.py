"""NVFP4 on both sides of a product, over a stand-in for FlashInfer, against models written another way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.fake_fp4 import FakeFlashInfer, handed_over, importable, installed
from helpers.quantise import FORMATS, write_quantised
from helpers.run_model import Driver, load_target
from helpers.tiny_mla import write_tiny_deepseek_v3
from helpers.tiny_models import write_tiny_llama
from helpers.tiny_moe import write_tiny_qwen3_moe
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_kernel.fp4 import flashinfer as fp4_flashinfer
from sgl_kernel.fp4.flashinfer import FlashInferFp4
from sgl_kernel.fp4.reference import fake_quantise
from sgl_kernel.fp4.weights import (
    experts_for_products,
    experts_ref,
    input_scale,
    linear_ref,
    matrix_for_products,
    why_not,
    why_not_experts,
)
from sgl_kernel.moe.weights import ExpertMatrix, Format
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.kernel_experts import KernelExperts
from sglang.srt.layers.moe.layer import MoE
from sglang.srt.layers.packed_linear import PackedLinear
from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.layers.quantization.packed_matrix import matrix_of
from sglang.srt.managers import executor_build_fp4
from sglang.srt.managers.executor_build_fp4 import check_fp4, expert_layers, linear_layers, use_fp4_inputs
from sglang.srt.managers.executor_build_models import ExecutorArgsError
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models import moe, packed
from sglang.srt.models.decoder import DecoderModel

DOUBLE = torch.float64


def write(writer: Callable[..., Path], root: Path, form: str = "nvfp4", **sizes: Any) -> tuple[Path, Path]:
    """The checkpoint, and the dequantised one; compressed-tensors' has input scales too, as reciprocals."""
    chosen = FORMATS[form]
    if writer is write_tiny_llama:  # attention too
        config = chosen.config | {"ignore": ["lm_head"]}
        chosen = replace(chosen, config=config, dense=("lm_head",))
    quantised, plain = write_quantised(writer(root / "source", seed=3, **sizes), root, chosen)
    if form == "ct-nvfp4":
        tensors = load_file(quantised / "model.safetensors")
        for i, name in enumerate([n for n in tensors if n.endswith("weight_packed")]):
            by = torch.tensor([2688 / (3 + i % 5)])
            tensors[name.replace("weight_packed", "input_global_scale")] = by
        save_file(tensors, quantised / "model.safetensors")
    return quantised, plain


def loaded(folder: Path, dtype: torch.dtype = DOUBLE) -> Any:
    """As a server on CUDA loads it, of which these fields are looked at."""
    with mock.patch.object(packed, "wants_kernels", lambda device: True):
        return SimpleNamespace(target=load_target(folder, dtype), dtype=dtype)


def logits(model: DecoderModel, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    """Of a prefill, a step and several queries a row."""
    driver = Driver(model, 16, dtype)
    ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(2))
    return torch.cat([driver.prefill(ids[:20]), driver.decode(ids[20:21]), driver.decode(ids[21:])])


def scales_of(model: DecoderModel) -> list[torch.Tensor | None]:
    """Of the inputs of each linear layer that can have them in 4 bits."""
    routers = [layer.mlp.router.linears() for layer in model.layers if isinstance(layer.mlp, MoE)]
    gates = {id(gate) for linears in routers for gate in linears}  # of kernels; on a CPU they are no linears
    of_model = [linear for linear in model.linears() if id(linear) not in gates]
    linears = [linear.matrix if isinstance(linear, PackedLinear) else None for linear in of_model]
    return [None if matrix is None or why_not(matrix) else input_scale(matrix) for matrix in linears]


def fake_inputs(linear: Linear, scale: torch.Tensor) -> None:
    """The layer of a dequantised model as one with inputs in 4 bits."""
    product = linear._product
    linear._product = lambda x: product(fake_quantise(x, 1 / scale).to(x.dtype))  # type: ignore[method-assign]


def fake_experts(experts: Experts, gate_up: ExpertMatrix, down: ExpertMatrix) -> None:
    assert down.input_scale is not None
    of_input, of_inner = 1 / input_scale(gate_up), 1 / down.input_scale[:, 0]

    def one(expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(fake_quantise(x, of_input).to(x.dtype), experts.gate_up[expert]).chunk(2, -1)
        inner = fake_quantise(F.silu(gate) * up, of_inner[expert])
        return F.linear(inner.to(x.dtype), experts.down[expert])

    experts.one = one  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "writer,form,linears,experts",
    [
        (write_tiny_llama, "nvfp4", 6, 0),  # q, k and v have scales of the whole that differ
        (write_tiny_qwen3_moe, "nvfp4", 2, 3),
        pytest.param(write_tiny_llama, "ct-nvfp4", 6, 0, marks=pytest.mark.long),
        pytest.param(write_tiny_deepseek_v3, "nvfp4", 8, 3, marks=pytest.mark.long),
    ],
)
def test_logits_are_those_of_fake_quantised_inputs(
    tmp_path: Path, writer: Callable[..., Path], form: str, linears: int, experts: int
) -> None:
    of_writer = {"num_hidden_layers": 2} if writer is write_tiny_llama else {"moe_intermediate_size": 32}
    sizes = {"hidden_size": 64} | of_writer
    quantised, plain = write(writer, tmp_path, form, **sizes)
    models, oracle = loaded(quantised), load_target(plain, DOUBLE)
    weights_alone = logits(models.target)
    for linear, scale in zip(
        oracle.linears(), scales_of(models.target)[: len(oracle.linears())], strict=False
    ):
        if scale is not None:
            fake_inputs(linear, scale)
    for own, packed_experts in zip(oracle.experts(), models.target.experts(), strict=True):
        assert isinstance(own, Experts) and isinstance(packed_experts, KernelExperts)
        if not why_not_experts(*packed_experts.matrices):
            fake_experts(own, *packed_experts.matrices)
    expected = logits(oracle)
    with installed(FakeFlashInfer()) as fake:
        assert handed_over(models) == linears + experts
        got = logits(models.target)
    assert {name for name, _ in fake.calls} == {"quantize", "mm"} | ({"experts"} if experts else set())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (got - weights_alone).norm() > 0.01 * got.norm(), "4 bits of an input are seen"


def test_an_input_scale_is_the_largest_of_the_parts(tmp_path: Path) -> None:
    """By the files' own numbers; compressed-tensors' are reciprocals."""
    quantised, _ = write(write_tiny_llama, tmp_path, hidden_size=128, num_hidden_layers=1)
    tensors = load_file(quantised / "model.safetensors")
    target = loaded(quantised).target
    mlp = "model.layers.0.mlp."
    for linear, parts in (
        (target.layers[0].mlp.gate_up, ("gate_proj", "up_proj")),
        (target.layers[0].mlp.down, ("down_proj",)),
    ):
        given = [float(tensors[f"{mlp}{part}.input_scale"]) for part in parts]
        assert float(input_scale(linear.matrix)) == max(given) and len(set(given)) == len(parts)
    codes, scale = torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 4).to(torch.float8_e4m3fn)
    of_parts = [Fp4Weight(codes, scale, torch.tensor(2.0), True, torch.tensor(by)) for by in (8.0, 4.0)]
    for gated in (False, True):
        matrix = matrix_of(of_parts, gated)
        assert matrix is not None and float(input_scale(matrix)) == 0.25
        missing = matrix_of([of_parts[0], replace(of_parts[1], input_scale=None)], gated)
        assert missing is not None and missing.input_scale is None


def a_matrix(rows: int, columns: int, seed: int, num: int = 1, parts: int = 1) -> ExpertMatrix:
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(-(2**31), 2**31, (num, rows, columns // 8), generator=g).int()
    scale = (torch.rand(num, rows, columns // 16, generator=g) + 0.1).to(torch.float8_e4m3fn)
    whole, given = (
        torch.rand(num, parts, generator=g) + 0.1,
        torch.rand(num, parts, generator=g) / 400 + 0.001,
    )
    return ExpertMatrix(Format.NVFP4, data, scale, whole, input_scale=given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_of_experts_in_passes(dtype: torch.dtype) -> None:
    """Many tokens go through in passes; gate and up have different scales; some tokens go nowhere."""
    gate_up, down = a_matrix(128, 96, 1, num=5, parts=2), a_matrix(96, 64, 2, num=5)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(11, 96, generator=g).to(dtype)
    chosen = torch.stack([torch.randperm(5, generator=g)[:3] for _ in range(11)])
    chosen[4], chosen[7, 1] = -1, -1
    weights = torch.rand(11, 3, generator=g)
    expected = experts_ref(x, weights, chosen, gate_up, down)
    kept = gate_up.data.clone()
    with installed(FakeFlashInfer()) as fake, mock.patch.object(fp4_flashinfer, "MAX_TOKENS", 4):
        flashinfer = FlashInferFp4()
        ready = experts_for_products(gate_up, down, copy=True)
        assert torch.equal(gate_up.data, kept), "a copy was asked for"
        flashinfer.reserve(ready, 3, dtype)
        got = flashinfer.experts(x, weights, chosen, ready)
    assert [rows for name, rows in fake.calls if name == "experts"] == [4, 4, 3]
    assert got.dtype == dtype and not got[4].any()
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (0.05 if dtype.itemsize == 2 else 1e-3)  # a code may be the next one after rounding


def test_rows_do_not_depend_on_those_beside_them() -> None:
    """What the toggle needs of a layer: one token's result is the same bits alone and among others."""
    linear, gate_up, down = (
        a_matrix(96, 64, 4),
        a_matrix(128, 64, 5, num=4, parts=2),
        a_matrix(64, 64, 6, num=4),
    )
    g = torch.Generator().manual_seed(7)
    x, weights = torch.randn(9, 64, generator=g, dtype=DOUBLE), torch.rand(9, 2, generator=g)
    chosen = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(9)])
    with installed(FakeFlashInfer()):
        flashinfer, ready = FlashInferFp4(), experts_for_products(gate_up, down)
        matrix = matrix_for_products(linear)
        flashinfer.reserve(ready, 2, DOUBLE)
        for begin, end in ((0, 9), (2, 5)):
            part = slice(begin, end)
            of_linear = flashinfer.linear(x[part], matrix)
            of_experts = flashinfer.experts(x[part], weights[part], chosen[part], ready)
            for row in range(begin, end):
                one = slice(row, row + 1)
                alone = (
                    flashinfer.linear(x[one], matrix),
                    flashinfer.experts(x[one], weights[one], chosen[one], ready),
                )
                torch.testing.assert_close(alone[0][0], of_linear[row - begin], rtol=1e-13, atol=1e-13)
                torch.testing.assert_close(alone[1][0], of_experts[row - begin], rtol=1e-13, atol=1e-13)


class Watching(TorchDispatchMode):
    """Every operation by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back_or_made_anew_in_a_call() -> None:
    """As a CUDA graph needs it; the stand-in makes but zeros. Workspaces are there before."""
    linear, gate_up, down = (
        a_matrix(128, 64, 4, parts=2),
        a_matrix(128, 64, 5, num=4, parts=2),
        a_matrix(64, 64, 6, num=4),
    )
    x, weights = torch.randn(9, 64).to(torch.bfloat16), torch.rand(9, 2)
    chosen = torch.zeros(9, 2, dtype=torch.int32)
    with installed(FakeFlashInfer(idle=True)):
        flashinfer, ready = FlashInferFp4(), experts_for_products(gate_up, down)
        matrix = matrix_for_products(linear)
        flashinfer.reserve(ready, 2, x.dtype)
        reserved = flashinfer._workspace
        with Watching() as watched:
            flashinfer.linear(x, matrix)
            flashinfer.experts(x, weights, chosen, ready)
        assert flashinfer._workspace is reserved and reserved is not None
    allowed = {
        "empty_like",
        "slice",
        "view",
        "t",
        "transpose",
        "detach",
        "cat",
        "new_zeros",
        "zero_",
        "_unsafe_view",
    }
    assert set(watched.names) <= allowed, "_local_scalar_dense reads back; _to_copy may cross to a CPU"


@pytest.mark.parametrize(
    "matrix,why",
    [
        (replace(a_matrix(64, 64, 1), input_scale=None), "without input scales"),
        (a_matrix(80, 64, 1), "of 80 x 64, no multiples of 32"),
        (a_matrix(96, 64, 1, parts=2), "of 48 x 64, no multiples of 32"),
        (replace(a_matrix(64, 64, 1), bias=torch.zeros(1, 64)), "with biases of its experts"),
        (ExpertMatrix(Format.PLAIN, torch.zeros(1, 64, 64)), "plain, not nvfp4"),
        (a_matrix(64, 32, 1), ""),
    ],
)
def test_what_can_have_inputs_in_4_bits(matrix: ExpertMatrix, why: str) -> None:
    assert why_not(matrix) == why and why_not_experts(a_matrix(64, 64, 2), matrix) == why


def test_ranks_add_up_to_the_whole(tmp_path: Path) -> None:
    """Each quantises its part of what lies between the products: in whole blocks, so to the same."""
    folder = write(write_tiny_qwen3_moe, tmp_path, hidden_size=64, moe_intermediate_size=64)[0]
    config = ModelConfig.from_folder(str(folder), None)
    assert config.moe is not None and config.quant is not None
    g = torch.Generator().manual_seed(4)
    x, weights = torch.randn(5, 64, generator=g, dtype=DOUBLE), torch.rand(5, 2, generator=g)
    chosen = torch.tensor([[0, 3], [1, 2], [7, 0], [5, 6], [4, 1]])
    sums = []
    with (
        installed(FakeFlashInfer()),
        mock.patch.object(packed, "wants_kernels", lambda device: True),
    ):
        for size in (1, 2):
            parts = []
            for rank in range(size):
                source = open_source(folder, "auto", DOUBLE, "cpu", config.quant)
                tp = TensorParallel(rank, size).in_units(config.quant.columns_unit)
                experts = moe.take_moe(source, "model.layers.1.mlp.", 64, config.moe, tp).experts
                assert isinstance(experts, KernelExperts) and not why_not_experts(*experts.matrices)
                flashinfer = FlashInferFp4()
                flashinfer.reserve(experts_for_products(*experts.matrices, copy=True), 2, DOUBLE)
                experts.use_fp4_inputs(flashinfer)
                parts.append(experts(x, weights, chosen))
            sums.append(torch.stack(parts).sum(0))
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=1e-9)


# ---- the start


def args(**given: Any) -> ExecutorArgs:
    return ExecutorArgs("m", **({"device": "cuda", "fp4_gemm_backend": "flashinfer_cutlass"} | given))


def start(folder: Path, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Any:
    models = loaded(folder, dtype)
    use_fp4_inputs(args(**given), models)
    return models


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    return write(write_tiny_qwen3_moe, tmp_path_factory.mktemp("moe"), **sizes)[0]


def test_what_is_asked_for_is_handed_over(moe_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with installed(FakeFlashInfer()) as fake:
        neither = start(moe_folder, fp4_gemm_backend="auto", moe_runner_backend="triton")
        assert not fake.calls
        linears = start(moe_folder)
        experts = start(moe_folder, fp4_gemm_backend="auto", moe_runner_backend="flashinfer_cutlass")
        both = start(moe_folder, moe_runner_backend="flashinfer_cutlass")
        texts = [logits(m.target, torch.bfloat16) for m in (neither, linears, experts, both)]
    for i, one in enumerate(texts):
        for other in texts[:i]:
            assert (one - other).norm() > 0.005 * one.norm()
    said = [r.message for r in caplog.records if "by FlashInfer" in r.message]
    assert [line.split(":")[0] for line in said] == ["2 linear layers", "3 layers of experts"] * 2


@pytest.mark.parametrize(
    "fault,word",
    [
        ("untiled", "off by 1."),
        ("nan", "off by nan"),
        ("zeros", "off by 1 of"),
        ("no kernel\nimage", "no kernel image"),
    ],
)
def test_a_failed_trial_leaves_weights_alone(
    moe_folder: Path, fault: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(loaded(moe_folder, torch.bfloat16).target, torch.bfloat16)
    with installed(FakeFlashInfer(fault)):
        models = start(moe_folder)
    (line,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "--fp4-gemm-backend flashinfer_cutlass failed its trial" in line and word in line
    assert torch.equal(logits(models.target, torch.bfloat16), expected)


def test_gate_and_up_in_the_wrong_order_fail_the_trial(
    moe_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with installed(FakeFlashInfer("swapped")):
        models = start(moe_folder, fp4_gemm_backend="auto", moe_runner_backend="flashinfer_cutlass")
    assert "8 x 64 x 64: off by" in caplog.text
    assert all(experts.matrices for experts in models.target.experts())


def test_all_ranks_or_none(moe_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class OneFails(TensorParallel):
        def least(self, value: int) -> int:
            return min(value, 0)

    models = loaded(moe_folder, torch.bfloat16)
    models.target.tp = OneFails()
    with installed(FakeFlashInfer()):
        use_fp4_inputs(args(), models)
    assert "on another rank" in caplog.text
    assert {
        type(linear.matrix) for linear in models.target.linears() if isinstance(linear, PackedLinear)
    } == {ExpertMatrix}


def test_limits_of_the_trial_have_room(moe_folder: Path) -> None:
    """What half precision makes of right products is well within them."""
    with installed(FakeFlashInfer()):
        flashinfer = FlashInferFp4()
        models = loaded(moe_folder, torch.bfloat16)
        for layer in linear_layers(models) + expert_layers(models):
            assert layer.error(flashinfer) < layer.limit / 2


def test_what_a_server_refuses(tmp_path: Path, moe_folder: Path) -> None:
    def check(pattern: str, given: ExecutorArgs, capability: tuple[int, int] = (12, 0)) -> None:
        with (
            mock.patch.object(torch.cuda, "current_device", lambda: 0),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
            mock.patch.object(torch.cuda, "get_device_name", lambda device: "NVIDIA H200"),
            pytest.raises(ExecutorArgsError, match=pattern),
        ):
            check_fp4(given)

    only_experts = {"fp4_gemm_backend": "auto", "moe_runner_backend": "flashinfer_cutlass"}
    check("--fp4-gemm-backend flashinfer_cutlass needs a GPU of SM100 or SM120", args(device="cpu"))
    with installed(FakeFlashInfer()):
        check("--fp4-gemm-backend .* need SM100 or SM120, and NVIDIA H200 is SM90$", args(), (9, 0))
        check("--moe-runner-backend flashinfer_cutlass: .*SM89", args(**only_experts), (8, 9))
    with importable({"flashinfer": None}):
        check("--fp4-gemm-backend flashinfer_cutlass: FlashInfer can't be imported", args())
    with importable({**FakeFlashInfer().modules(), "flashinfer.fused_moe": None}):
        check("FlashInfer has no NVFP4 products .*pip install", args())
    with installed(FakeFlashInfer()):
        with pytest.raises(ExecutorArgsError, match="is for bfloat16 and float16, not torch.float32"):
            start(moe_folder, torch.float32)
        llama = write_tiny_llama(tmp_path / "llama", seed=1)
        with pytest.raises(
            ExecutorArgsError, match="the model has no linear layers in NVFP4 .*: leave it out"
        ):
            start(llama)
        with pytest.raises(ExecutorArgsError, match="the model has no layers of experts in NVFP4"):
            start(llama, **only_experts)
    assert executor_build_fp4.wanted(args(fp4_gemm_backend="triton")) == []


def test_a_reference_of_some_rows() -> None:
    matrix, x = a_matrix(96, 64, 9), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear_ref(x, matrix, slice(32, 64)), linear_ref(x, matrix)[:, 32:64])
