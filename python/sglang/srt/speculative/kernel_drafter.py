"""Drafts and syncs of a device step, for draft models of one layer: no host decision in it.

The same maths as ``eagle_worker_v2.py``, which is its oracle; trees are drafted in ``kernel_tree.py``.
"""

from __future__ import annotations

import torch

from sgl_kernel.speculation.accept import Accepted
from sgl_kernel.speculation.inputs.ops import Keep
from sglang.srt.layers.attention.base import Block, CacheRows, DecodeRows, KernelAttention
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.model_executor.decode_step import Rows
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_plan import PAD_SLOT, SpecShape
from sglang.srt.models.draft_model import DraftModel
from sglang.srt.sampling.kernel_sampler import KernelSampler
from sglang.srt.speculative.draft_forward import DraftInputs, DraftTokens, draft_forward
from sglang.srt.speculative.kernel_tree import KernelTrees


class KernelDrafter:
    """Implements ``DeviceDrafter``."""

    def __init__(
        self,
        model: DraftModel,
        backend: KernelAttention,  # bound to the drafter's pool
        state: SlotState,
        sampler: KernelSampler,
        spec: SpecShape,
    ) -> None:
        self.aux_layers = model.aux_layers
        self._model = model
        self._forward = draft_forward(model)
        self._backend = backend
        self._state = state
        self._sampler = sampler
        self._trees = KernelTrees(model, backend, state, sampler.states, spec) if spec.topk > 1 else None

    def draft(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> DraftTree | None:
        if self._trees is not None:
            return self._trees.draft(rows, tokens, draft_len)
        self._chain(rows, tokens, draft_len)
        return None

    def sync(
        self,
        rows: Rows,
        aux: torch.Tensor,
        accepted: Accepted,
        is_tree: bool,
        token_of: torch.Tensor | None = None,
    ) -> None:
        """Columns past a row's count are left out."""
        num_columns = accepted.path.shape[1]
        features = self._model.feature(aux)  # [R * N, H], or [T, H]
        if token_of is not None:
            features = features[token_of.flatten()]
        inputs = DraftInputs(accepted.tokens, features, accepted.path if is_tree else None)
        keep = Keep(self._state.draft_feature, rows.slots, accepted.counts, PAD_SLOT)
        positions = Positions(self._model.rope, rows.root, num_columns)
        product = self._forward.entries(inputs, keep, positions, rows.pdl)
        of_rows = CacheRows(rows.slots, rows.root, num_columns, accepted.counts, rows.pdl)
        self._backend.write(0, product, of_rows)

    def _chain(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> None:
        """Forward 1 on the pair (x_L, g_{L-1}) at L - 1, whose KV is there; the others see themselves."""
        state, slots, root = self._state, rows.slots, rows.root
        inputs = DraftInputs(state.next_token, state.draft_feature, slots=slots)
        attention = self._backend.decode(DecodeRows(slots, root, 0, 1, Block.NONE))
        of_rows = DraftTokens(root - 1, slots, rows.pdl)
        hidden = self._forward.layer(inputs, of_rows, attention, write=False)
        self._guess(rows, hidden, tokens, 1)
        for i in range(2, draft_len + 1):
            inputs = DraftInputs(tokens[:, i - 1 : i], hidden)
            position = root if i == 2 else root + (i - 2)
            attention = self._backend.decode(DecodeRows(slots, position, 0, 1))
            of_rows = DraftTokens(position, slots, rows.pdl)
            hidden = self._forward.layer(inputs, of_rows, attention, write=True)
            self._guess(rows, hidden, tokens, i)

    def _guess(self, rows: Rows, hidden: torch.Tensor, tokens: torch.Tensor, i: int) -> None:
        """Column i of ``tokens``: the guess of the token with index L + i."""
        logits = self._model.logits(hidden)
        self._sampler.guess(logits, rows.slots, rows.root, i, self._model.target_ids, tokens[:, i])
