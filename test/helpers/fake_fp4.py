"""FlashInfer's NVFP4 functions in torch, from the very arguments the real ones get.

With the checks that their sources make, but that float32 and float64 may stand for half precision. Scales
are read out of their tiles by the formula of a place, not by sgl_kernel's layout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from sgl_kernel.fp4.reference import Quantised, quantise
from sglang.srt.managers import executor_build, executor_build_fp4
from sglang.srt.managers.executor_build_models import LoadedModels, load_models
from sglang.srt.models import packed

HALVES = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)
BYTES_A_TOKEN = 64  # of the fake's workspace


def places(rows: int, columns: int) -> torch.Tensor:
    """[N, G] int64: where the scale of a row's block lies."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tiles = -(-columns // 4)
    return ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 128) * 128, -(-columns // 4) * 4


class FakeFlashInfer:
    """``fault``: what goes wrong: "swapped" gate and up, "untiled" scales, "nan" or "zeros" in a row, or an
    error's text."""

    def __init__(self, fault: str = "", idle: bool = False) -> None:
        self.fault = fault
        self.idle = idle  # nothing is computed: results are zeros
        self.calls: list[tuple[str, int]] = []  # name, rows

    def modules(self) -> dict[str, ModuleType]:
        package, fused_moe = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe")
        package.__dict__.update(
            nvfp4_quantize=self.nvfp4_quantize,
            mm_fp4=self.mm_fp4,
            SfLayout=SimpleNamespace(layout_128x4=0, layout_8x4=1, layout_linear=2),
            fused_moe=fused_moe,
        )
        fused_moe.__dict__.update(
            cutlass_fused_moe=self.cutlass_fused_moe,
            cutlass_fused_moe_workspace_size=self.cutlass_fused_moe_workspace_size,
        )
        return {"flashinfer": package, "flashinfer.fused_moe": fused_moe}

    def nvfp4_quantize(
        self, a: torch.Tensor, a_global_sf: torch.Tensor, *, sfLayout: int, do_shuffle: bool, enable_pdl: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert a.dim() == 2 and a.is_contiguous() and a.dtype in (*HALVES, *WIDE) and a.shape[1] % 16 == 0
        assert a_global_sf.dtype == torch.float32 and a_global_sf.numel() == 1
        assert sfLayout == 0 and not do_shuffle and not enable_pdl
        self.calls.append(("quantize", len(a)))
        shape = tiled_shape(len(a), a.shape[1] // 16)
        if self.idle:
            return a.new_zeros(len(a), a.shape[1] // 2, dtype=torch.uint8), a.new_zeros(
                shape, dtype=torch.uint8
            )
        quantised = quantise(a, a_global_sf)
        tiled = torch.zeros(shape, dtype=torch.uint8)
        tiled.view(-1)[places(*quantised.scale.shape).flatten()] = quantised.scale.view(torch.uint8).flatten()
        return quantised.codes, tiled

    def mm_fp4(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_descale: torch.Tensor,
        b_descale: torch.Tensor,
        alpha: torch.Tensor,
        out_dtype: torch.dtype,
        *,
        backend: str,
    ) -> torch.Tensor:
        self._fail()
        assert backend == "cutlass" and out_dtype in (*HALVES, *WIDE)
        assert a.dtype == b.dtype == torch.uint8 and a.shape[1] == b.shape[0]
        assert a.is_contiguous() and b.t().is_contiguous(), "b is column-major"
        assert alpha.dtype == torch.float32 and alpha.numel() == 1
        assert b.shape[1] % 32 == 0 and 2 * b.shape[0] % 32 == 0
        self.calls.append(("mm", len(a)))
        if self.idle:
            return alpha.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)
        left, right = self._values(a, a_descale), self._values(b.t(), b_descale.t())
        out = (left.double() @ right.double().t()) * alpha.double()
        if self.fault in ("nan", "zeros") and len(out) == 33:  # for one number of rows, and in one row
            out[7] *= float("nan") if self.fault == "nan" else 0
        return out.to(out_dtype)

    def cutlass_fused_moe_workspace_size(
        self,
        max_num_tokens: int,
        hidden_size: int,
        intermediate_size: int,
        num_experts_total: int,
        top_k: int,
        *,
        x_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        output_dtype: torch.dtype,
        use_fused_finalize: bool,
        device: torch.device,
    ) -> int:
        assert x_dtype == torch.uint8 and weight_dtype == torch.int64 and not use_fused_finalize
        assert output_dtype in (*HALVES, *WIDE) and 1 <= top_k <= num_experts_total
        assert hidden_size % 32 == intermediate_size % 32 == 0
        return max_num_tokens * BYTES_A_TOKEN

    def cutlass_fused_moe(
        self,
        input: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        fc1_expert_weights: torch.Tensor,
        fc2_expert_weights: torch.Tensor,
        output_dtype: torch.dtype,
        quant_scales: Sequence[torch.Tensor],
        *,
        input_sf: torch.Tensor,
        output: torch.Tensor,
        enable_pdl: bool,
        use_fused_finalize: bool,
        workspace_buffer: torch.Tensor,
    ) -> None:
        self._fail()
        num, hidden, inner = (
            fc2_expert_weights.shape[0],
            fc2_expert_weights.shape[1],
            16 * fc2_expert_weights.shape[2],
        )
        tokens = len(input)
        assert fc1_expert_weights.dtype == fc2_expert_weights.dtype == torch.int64
        assert fc1_expert_weights.shape == (num, 2 * inner, hidden // 16)
        assert input.dtype == torch.uint8 and input.shape == (tokens, hidden // 2)
        assert token_selected_experts.dtype == torch.int32 and token_final_scales.dtype == torch.float32
        assert (
            token_selected_experts.shape == token_final_scales.shape == (tokens, token_final_scales.shape[1])
        )
        assert output.shape == (tokens, hidden) and output.dtype == output_dtype and output.is_contiguous()
        assert not use_fused_finalize and not enable_pdl
        assert workspace_buffer.dtype == torch.uint8 and workspace_buffer.dim() == 1
        assert workspace_buffer.numel() >= tokens * BYTES_A_TOKEN
        given, scale1, alpha1, given2, scale2, alpha2 = quant_scales
        assert given.dtype == given2.dtype == alpha1.dtype == alpha2.dtype == torch.float32
        assert given.dim() == 0 and given2.shape == alpha1.shape == alpha2.shape == (num,)
        assert scale1.dtype == scale2.dtype == torch.int32
        assert scale1.shape == (num, *self._words(2 * inner, hidden)) and scale2.shape == (
            num,
            *self._words(hidden, inner),
        )
        tensors = (input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights)
        assert all(t.is_contiguous() for t in (*tensors, *quant_scales))
        self.calls.append(("experts", tokens))
        output.zero_()
        if self.idle:
            return
        x = self._values(input, input_sf).double()  # [T, H]
        total = torch.zeros(tokens, hidden, dtype=torch.float64)
        for expert in range(num):
            first = self._values(
                fc1_expert_weights[expert].view(torch.uint8), scale1[expert].view(torch.uint8)
            )
            last = self._values(
                fc2_expert_weights[expert].view(torch.uint8), scale2[expert].view(torch.uint8)
            )
            token, choice = (token_selected_experts == expert).nonzero(as_tuple=True)
            up, gate = (
                ((x[token] @ first.double().t()) * alpha1[expert].double()).to(output_dtype).chunk(2, dim=1)
            )
            if self.fault == "swapped":
                up, gate = gate, up
            between = quantise(F.silu(gate) * up, given2[expert])
            part = (between.values().double() @ last.double().t()) * alpha2[expert].double()
            total.index_add_(0, token, part * token_final_scales[token, choice, None].double())
        output.copy_(total.to(output_dtype))

    def _values(self, codes: torch.Tensor, tiled: torch.Tensor) -> torch.Tensor:
        rows, columns = codes.shape[0], codes.shape[1] // 8
        assert tiled.dtype == torch.uint8 and tiled.is_contiguous()
        assert tuple(tiled.shape) == tiled_shape(rows, columns)
        where = places(rows, columns).flatten()
        if self.fault == "untiled":
            where = torch.arange(rows * columns)
        scale = tiled.flatten()[where].view(rows, columns).view(torch.float8_e4m3fn)
        return Quantised(codes, scale).values()

    def _words(self, rows: int, columns: int) -> tuple[int, int]:
        padded_rows, padded_columns = tiled_shape(rows, columns // 16)
        return padded_rows, padded_columns // 4

    def _fail(self) -> None:
        if self.fault not in ("", "swapped", "untiled", "nan", "zeros"):
            raise RuntimeError(self.fault)


@contextmanager
def importable(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """What importing them gives (None: an error). What else is imported meanwhile stays, as it would not with
    ``mock.patch.dict``: a module that is imported twice has its classes twice."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextmanager
def installed(fake: FakeFlashInfer) -> Iterator[FakeFlashInfer]:
    """What ``import flashinfer`` gives."""
    with importable(fake.modules()):
        yield fake


@contextmanager
def fp4_inputs(fake: FakeFlashInfer) -> Iterator[FakeFlashInfer]:
    """Models on this CPU stay packed and multiply NVFP4 with NVFP4, as a server on SM120 would have them."""

    def load(*args: Any, **kwargs: Any) -> LoadedModels:
        models = load_models(*args, **kwargs)
        handed_over(models)
        return models

    with (
        installed(fake),
        mock.patch.object(packed, "wants_kernels", lambda device: True),
        mock.patch.object(executor_build, "load_models", load),
    ):
        yield fake


def handed_over(models: Any) -> int:
    """Layers of a target, after their trials: how many."""
    from sgl_kernel.fp4.flashinfer import FlashInferFp4

    flashinfer, count = FlashInferFp4(), 0
    for layers in (executor_build_fp4.linear_layers(models), executor_build_fp4.expert_layers(models)):
        able = [layer for layer in layers if not layer.why_not]
        assert executor_build_fp4.trial(able, flashinfer) == ""
        for layer in able:
            layer.hand_over(flashinfer)
        count += len(able)
    return count
