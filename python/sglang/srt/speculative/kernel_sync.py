"""The draft cache of prompt tokens, by the kernels of sgl_kernel: what a prefill step does for a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.attention.base import CacheRows, KernelAttention
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.model_executor.drafter import DraftContext, DraftTree
from sglang.srt.model_executor.step_plan import SlotAdmission
from sglang.srt.models.draft_model import DraftModel
from sglang.srt.speculative.draft_forward import DraftInputs, draft_forward
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2


class KernelSync:
    """``Drafter`` whose sync is few launches: for EAGLE-3 the pairs' norms, a product, rotary and write."""

    def __init__(self, worker: EAGLEWorkerV2, model: DraftModel, backend: KernelAttention) -> None:
        """``worker``: over the same model and backend, which is bound to the drafter's pool."""
        self.aux_layers = worker.aux_layers
        self._worker = worker
        self._model = model
        self._forward = draft_forward(model)
        self._backend = backend

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        self._worker.admit(admissions)

    def draft(self, ctx: DraftContext, draft_len: int) -> DraftTree:
        return self._worker.draft(ctx, draft_len)

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        """[T, num_aux * H_target] -> [T, H_draft]."""
        return self._worker.feature(aux)

    def sync(
        self,
        next_ids: torch.Tensor,  # [T] int64: x_{t+1}
        features: torch.Tensor,  # [T, H_draft]: g_t
        slots: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64: t
    ) -> None:
        """The draft cache of these positions. The pad slot's is not written: nobody reads it."""
        inputs = DraftInputs(next_ids[:, None], features)
        product = self._forward.entries(inputs, None, Positions(self._model.rope, positions), pdl=False)
        self._backend.write(0, product, CacheRows(slots, positions))
