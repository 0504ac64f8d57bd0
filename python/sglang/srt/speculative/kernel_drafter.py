"""Drafts and syncs of a device step: EAGLE-3 over the kernels of sgl_kernel, no host decision in it.

The same maths as ``eagle_worker_v2.py``, which is its oracle; trees are drafted in ``kernel_tree.py``.
"""

from __future__ import annotations

import torch

from sgl_kernel.rope.ops import CachePlaces, RopeTables, TokenRows, rope_cache_write
from sgl_kernel.speculation.accept import Accepted
from sgl_kernel.speculation.inputs.ops import Keep, pair_inputs
from sglang.srt.layers.attention.base import Block, DecodeRows
from sglang.srt.layers.attention.triton_backend import TritonAttention
from sglang.srt.model_executor.decode_step import Rows
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_plan import PAD_SLOT, SpecShape
from sglang.srt.models.llama_eagle3 import LlamaEagle3
from sglang.srt.sampling.kernel_sampler import KernelSampler
from sglang.srt.speculative.kernel_sync import pair_weights
from sglang.srt.speculative.kernel_tree import KernelTrees


class KernelDrafter:
    """Implements ``DeviceDrafter``."""

    def __init__(
        self,
        model: LlamaEagle3,
        backend: TritonAttention,  # bound to the drafter's pool
        state: SlotState,
        sampler: KernelSampler,
        spec: SpecShape,
    ) -> None:
        self.aux_layers = model.aux_layers
        self._model = model
        self._backend = backend
        self._state = state
        self._sampler = sampler
        self._trees = KernelTrees(model, backend, state, sampler.states, spec) if spec.topk > 1 else None
        self._weights = pair_weights(model)

    def draft(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> DraftTree | None:
        if self._trees is not None:
            return self._trees.draft(rows, tokens, draft_len)
        self._chain(rows, tokens, draft_len)
        return None

    def sync(self, rows: Rows, aux: torch.Tensor, accepted: Accepted, is_tree: bool) -> None:
        model, state = self._model, self._state
        features = model.feature(aux)  # [R * N, H]
        num_pairs = accepted.path.numel()
        pairs = pair_inputs(
            accepted.tokens,
            features,
            self._weights,
            features.new_empty(num_pairs, 2 * features.shape[1]),
            nodes=accepted.path if is_tree else None,
            keep=Keep(state.draft_feature, rows.slots, accepted.counts, PAD_SLOT),
            pdl=rows.pdl,
        )
        pool, rope = self._backend.pool, model.rope
        rope_cache_write(
            model.attention.kv(pairs),
            0,
            pool.num_kv_heads,
            RopeTables(rope.cos, rope.sin),
            TokenRows(rows.slots, rows.root, counts=accepted.counts),
            cache=CachePlaces(pool.layer_kv(0), state.page_table, pool.page_size, pad_slot=PAD_SLOT),
            pdl=rows.pdl,
        )

    def _chain(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> None:
        """Forward 1 on the pair (x_L, g_{L-1}) at L - 1, whose KV is there; the others see themselves."""
        state, slots, root = self._state, rows.slots, rows.root
        num_rows, size = slots.shape[0], self._model.feature_size
        hidden = state.draft_feature.new_empty(num_rows, size)
        pairs = pair_inputs(
            state.next_token,
            state.draft_feature,
            self._weights,
            hidden.new_empty(num_rows, 2 * size),
            slots=slots,
            hidden=hidden,
            pdl=rows.pdl,
        )
        attention = self._backend.decode(DecodeRows(slots, root, 0, 1, Block.NONE))
        hidden = self._model.layer_of_pairs(pairs, hidden, root - 1, attention, write=False)
        self._guess(rows, hidden, tokens, 1)
        for i in range(2, draft_len + 1):
            pairs = pair_inputs(
                tokens[:, i - 1 : i],
                hidden,
                self._weights,
                hidden.new_empty(num_rows, 2 * size),
                pdl=rows.pdl,
            )
            position = root if i == 2 else root + (i - 2)
            attention = self._backend.decode(DecodeRows(slots, position, 0, 1))
            hidden = self._model.layer_of_pairs(pairs, hidden, position, attention, write=True)
            self._guess(rows, hidden, tokens, i)

    def _guess(self, rows: Rows, hidden: torch.Tensor, tokens: torch.Tensor, i: int) -> None:
        """Column i of ``tokens``: the guess of the token with index L + i."""
        logits = self._model.logits(hidden)
        self._sampler.guess(logits, rows.slots, rows.root, i, self._model.target_ids, tokens[:, i])
