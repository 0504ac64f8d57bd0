"""Draft trees of a device step, over the kernels of sgl_kernel: the trees of ``eagle_worker_v2.py``.

Beside the layer itself a level is four launches: the pairs of its nodes, attention's plan, the best of
every block of the vocabulary, and what the next level reads, or with the last one the tree.
"""

from __future__ import annotations

import torch

from sgl_kernel.speculation.tree.ops import DraftRows, Frontier, Tree, TreeBuffers, expand, finish
from sglang.srt.layers.attention.base import Block, DecodeRows, KernelAttention, ScratchRows
from sglang.srt.model_executor.decode_step import Rows
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.models.draft_model import DraftModel
from sglang.srt.sampling.states import SamplingStates
from sglang.srt.speculative.draft_forward import DraftInputs, DraftTokens, draft_forward


class KernelTrees:
    """Drafts the trees of a ``KernelDrafter`` whose shape has a topk above 1."""

    def __init__(
        self,
        model: DraftModel,
        backend: KernelAttention,  # bound to the drafter's pool
        state: SlotState,
        states: SamplingStates,
        spec: SpecShape,
    ) -> None:
        self._model = model
        self._backend = backend
        self._state = state
        self._states = states
        self._spec = spec
        self._forward = draft_forward(model)

    def draft(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> DraftTree:
        """tokens: [R, …] int64, of which column 0 holds the roots'."""
        model, states, device = self._model, self._states, rows.slots.device
        num_rows, levels, target_ids = rows.slots.shape[0], draft_len, model.target_ids
        buffers = TreeBuffers.make(num_rows, self._spec.topk, levels, target_ids.shape[0], device)
        of_rows = DraftRows(rows.slots, rows.root, states.temperature, states.seed, target_ids)
        hidden = self._open(rows)
        for level in range(levels - 1):
            frontier = expand(level, model.logits(hidden), of_rows, buffers, pdl=rows.pdl)
            hidden = self._level(rows, level, frontier, hidden)
        tree = Tree.make(num_rows, self._spec.num_nodes(draft_len), device)
        finish(model.logits(hidden), of_rows, buffers, tokens[:, 0], tree, pdl=rows.pdl)
        return DraftTree(tree.tokens, tree.parents, tree.depths, tree.mask)

    def _open(self, rows: Rows) -> torch.Tensor:
        """Forward 1, on the pair (x_L, g_{L-1}) at L - 1, whose KV is there: [R, H]."""
        inputs = DraftInputs(self._state.next_token, self._state.draft_feature, slots=rows.slots)
        attention = self._backend.decode(DecodeRows(rows.slots, rows.root, 0, 1, Block.NONE))
        tokens = DraftTokens(rows.root - 1, rows.slots, rows.pdl)
        return self._forward.layer(inputs, tokens, attention, write=False)

    def _level(self, rows: Rows, level: int, frontier: Frontier, above: torch.Tensor) -> torch.Tensor:
        """A forward of the k nodes of every row's frontier: [R * k, H]. Their KV goes to scratch places.

        above: [R * nodes, H], outputs of the level above.
        """
        k = self._spec.topk
        inputs = DraftInputs(frontier.tokens, above, frontier.parent)
        # Lengths are read on the device: no bound is needed.
        attention = self._backend.scratch(ScratchRows(rows.slots, rows.root, 0, k, k * level, frontier.seen))
        tokens = DraftTokens(frontier.positions.view(-1), rows.slots, rows.pdl)
        return self._forward.layer(inputs, tokens, attention, write=True)
