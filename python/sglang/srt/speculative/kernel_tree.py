"""Draft trees of a device step, over the kernels of sgl_kernel: the trees of ``eagle_worker_v2.py``.

Beside the layer itself a level is four launches: the pairs of its nodes, attention's plan, the best of
every block of the vocabulary, and what the next level reads, or with the last one the tree.
"""

from __future__ import annotations

import torch

from sgl_kernel.speculation.inputs.ops import pair_inputs
from sgl_kernel.speculation.tree.ops import DraftRows, Frontier, Tree, TreeBuffers, expand, finish
from sglang.srt.layers.attention.base import Block, DecodeRows, ScratchRows
from sglang.srt.layers.attention.triton_backend import TritonAttention
from sglang.srt.model_executor.decode_step import Rows
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.models.llama_eagle3 import LlamaEagle3
from sglang.srt.sampling.states import SamplingStates
from sglang.srt.speculative.kernel_sync import pair_weights


class KernelTrees:
    """Drafts the trees of a ``KernelDrafter`` whose shape has a topk above 1."""

    def __init__(
        self,
        model: LlamaEagle3,
        backend: TritonAttention,  # bound to the drafter's pool
        state: SlotState,
        states: SamplingStates,
        spec: SpecShape,
    ) -> None:
        self._model = model
        self._backend = backend
        self._state = state
        self._states = states
        self._spec = spec
        self._weights = pair_weights(model)

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
        state, num_rows, size = self._state, rows.slots.shape[0], self._model.feature_size
        hidden = state.draft_feature.new_empty(num_rows, size)
        pairs = pair_inputs(
            state.next_token,
            state.draft_feature,
            self._weights,
            hidden.new_empty(num_rows, 2 * size),
            slots=rows.slots,
            hidden=hidden,
            pdl=rows.pdl,
        )
        attention = self._backend.decode(DecodeRows(rows.slots, rows.root, 0, 1, Block.NONE))
        return self._model.layer_of_pairs(pairs, hidden, rows.root - 1, attention, write=False)

    def _level(self, rows: Rows, level: int, frontier: Frontier, above: torch.Tensor) -> torch.Tensor:
        """A forward of the k nodes of every row's frontier: [R * k, H]. Their KV goes to scratch places.

        above: [R * nodes, H], outputs of the level above.
        """
        k, size = self._spec.topk, self._model.feature_size
        hidden = above.new_empty(frontier.tokens.numel(), size)
        pairs = pair_inputs(
            frontier.tokens,
            above,
            self._weights,
            hidden.new_empty(hidden.shape[0], 2 * size),
            nodes=frontier.parent,
            hidden=hidden,
            pdl=rows.pdl,
        )
        # Lengths are read on the device: no bound is needed.
        attention = self._backend.scratch(ScratchRows(rows.slots, rows.root, 0, k, k * level, frontier.seen))
        positions = frontier.positions.view(-1)
        return self._model.layer_of_pairs(pairs, hidden, positions, attention, write=True)
