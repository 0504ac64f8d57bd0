"""The draft cache of prompt tokens, by the kernels of sgl_kernel: what a prefill step does for a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kernel.rope.ops import CachePlaces, RopeTables, TokenRows, rope_cache_write
from sgl_kernel.speculation.inputs.ops import PairWeights, pair_inputs
from sglang.srt.layers.attention.triton_backend import TritonAttention
from sglang.srt.model_executor.drafter import DraftContext, DraftTree
from sglang.srt.model_executor.step_plan import PAD_SLOT, SlotAdmission
from sglang.srt.models.llama_eagle3 import LlamaEagle3
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2


def pair_weights(model: LlamaEagle3) -> PairWeights:
    embed, hidden = model.embed_norm, model.hidden_norm
    return PairWeights(model.embed.weight, embed.weight, hidden.weight, embed.eps, hidden.eps)


class KernelSync:
    """``Drafter`` whose sync is three launches: the pairs' norms, a product, rotary and cache write."""

    def __init__(self, worker: EAGLEWorkerV2, model: LlamaEagle3, backend: TritonAttention) -> None:
        """``worker``: over the same model and backend, which is bound to the drafter's pool."""
        self.aux_layers = worker.aux_layers
        self._worker = worker
        self._model = model
        self._backend = backend
        self._weights = pair_weights(model)

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
        """The draft KV of these positions. The pad slot's is not written: nobody reads it."""
        num_pairs, size = features.shape
        out = features.new_empty(num_pairs, 2 * size)
        pairs = pair_inputs(next_ids[:, None], features, self._weights, out)
        pool, rope = self._backend.pool, self._model.rope
        places = CachePlaces(pool.layer_kv(0), self._backend.page_table, pool.page_size, pad_slot=PAD_SLOT)
        rope_cache_write(
            self._model.attention.kv(pairs),
            0,
            pool.num_kv_heads,
            RopeTables(rope.cos, rope.sin),
            TokenRows(slots, positions),
            cache=places,
        )
