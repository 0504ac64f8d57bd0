"""Attention with prefill by FlashInfer; decode and verify stay with sgl_kernel's own kernels.

FlashInfer plans a step from lengths that the host knows exactly, which it does for prefill chunks alone:
decode rows are launched before the results of the step ahead of them are known.
"""

from __future__ import annotations

import torch

from sgl_kernel.attention.prefill.flashinfer import FlashInferPrefill
from sglang.srt.layers.attention.base import DecodeRows, LayerAttention, PrefillRows, ScratchRows
from sglang.srt.layers.attention.heads import Scope
from sglang.srt.layers.attention.triton_backend import PrefillLayers, TritonAttention


class FlashInferAttention:
    """``AttentionBackend`` over the pool and the page table of ``own``, which takes all but the chunks."""

    needs_exact_lens = False

    def __init__(self, own: TritonAttention, planner: FlashInferPrefill) -> None:
        self._own = own
        self._planner = planner  # of the same shape

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool places of (slot, position) pairs; same shape as its arguments, int64."""
        return self._own.places(slots, positions)

    def decode(self, rows: DecodeRows) -> LayerAttention:
        return self._own.decode(rows)

    def scratch(self, rows: ScratchRows) -> LayerAttention:
        return self._own.scratch(rows)

    def prefill(self, rows: PrefillRows) -> LayerAttention:
        return self._prefill(rows)

    def mixed(self, decode: DecodeRows, prefill: PrefillRows) -> LayerAttention:
        return self._own.mixed_with(decode, self._prefill(prefill))

    def _prefill(self, rows: PrefillRows) -> PrefillLayers:
        plan = self._planner.plan(self._own.page_table, rows.slots, rows.starts, rows.query_lens)

        def attend(
            q: torch.Tensor, kv: torch.Tensor, scale: torch.Tensor | None, scope: Scope, out: torch.Tensor
        ) -> torch.Tensor:
            assert scope.is_plain, "windows and sinks are our own kernels'"
            assert scale is None, "a pool of one byte a number is not FlashInfer's here"
            return plan.attend(q, kv, out)

        return PrefillLayers(self._own, plan.places.token_slots, plan.places.places, attend)
