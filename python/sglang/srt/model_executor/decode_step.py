"""A decode step as launches on one stream, with nothing of the host in it: what a CUDA graph captures.

The same step as ``step.py``'s (which is its oracle), over the kernels of sgl_kernel: it reads the slot
state on the device, and all that depends on the batch is its shape. sgl_kernel's references run it on a
CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_kernel.sampling.rows import Depths, NodeRows
from sgl_kernel.speculation.accept import Accepted, SlotRows, accept, begin_rows
from sgl_kernel.speculation.move import move_path
from sgl_kernel.speculation.ragged.ops import Layout, QueryLens, lay_out
from sglang.srt.layers.attention.base import AttentionBackend, Block, DecodeRows, RaggedQueries
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step import TargetModel
from sglang.srt.model_executor.step_plan import PAD_SLOT, SpecShape
from sglang.srt.model_executor.step_trace import StepDone, StepTrace
from sglang.srt.sampling.kernel_sampler import KernelSampler, NodeMasks

MAX_PDL_TOKENS = 32
"""Up to so many tokens small launches overlap with the kernel ahead of them."""


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows of one step."""

    slots: torch.Tensor  # [R] int64; PAD_SLOT for padding
    root: torch.Tensor  # [R] int64: L
    pdl: bool  # launches overlap with the kernel ahead


@dataclass(frozen=True, slots=True)
class StepStart:
    """A step up to its choices, launched."""

    rows: Rows
    tree: DraftTree
    draft_len: int
    query_lens: QueryLens | None
    layout: Layout | None
    hidden: torch.Tensor  # [R * N, H], or with a layout [T, H]
    aux: torch.Tensor | None


class DeviceDrafter(Protocol):
    """What a device step asks of a drafter."""

    aux_layers: tuple[int, ...]

    def draft(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> DraftTree | None:
        """A chain: fill ``tokens`` [R, draft_len + 1] from column 1 on and return None; or a tree."""
        ...

    def sync(
        self,
        rows: Rows,
        aux: torch.Tensor,
        accepted: Accepted,
        is_tree: bool,
        token_of: torch.Tensor | None = None,
    ) -> None:
        """Draft KV of the committed positions, and the last feature of each row.

        aux: [R * N, num_aux * H_target] of all nodes; or [T, …] of some, ``token_of`` [R, N] int64 saying
        which is a node's.
        """
        ...


class AcceptanceRewriter(Protocol):
    """Simulated acceptance: changes the nodes' own tokens (and the choices) before they are compared."""

    def rewrite(
        self,
        tokens: torch.Tensor,  # [R, N] int64
        choice: torch.Tensor,  # [R, N] int64
        root: torch.Tensor,  # [R] int64
        slots: torch.Tensor,  # [R] int64
        parents: torch.Tensor | None = None,  # [R, N] int64 of a tree
    ) -> None: ...


class DecodeStep:
    """One for a worker. ``run`` is good for every mix of requests: the host decides nothing in it."""

    def __init__(
        self,
        state: SlotState,
        sampler: KernelSampler,
        model: TargetModel,
        pool: KVPool,
        backend: AttentionBackend,  # bound to ``pool``
        spec: SpecShape | None,
        drafter: DeviceDrafter | None,
        simulated: AcceptanceRewriter | None = None,
    ) -> None:
        self._state = state
        self._sampler = sampler
        self._model = model
        self._pool = pool
        self._backend = backend
        self._spec = spec
        self._drafter = drafter
        self._simulated = simulated

    def run(self, slots: torch.Tensor, draft_len: int, query_lens: QueryLens | None = None) -> StepDone:
        """slots: [R] int64 -> up to C = draft_len + 1 tokens of each, none of the pad slot.

        query_lens: of chains; a row accepts no more than the drafts it verifies, of the ``draft_len`` made.
        """
        return self.finish(self.begin(slots, draft_len, query_lens))

    def begin(self, slots: torch.Tensor, draft_len: int, query_lens: QueryLens | None = None) -> StepStart:
        """Drafts, and the target on every node."""
        rows, tree = self._begin(slots, draft_len)
        layout = None if query_lens is None else _laid_out(rows, tree, query_lens)
        hidden, aux = self._forward(rows, tree, layout)
        return StepStart(rows, tree, draft_len, query_lens, layout, hidden, aux)

    def finish(
        self,
        start: StepStart,
        allowed: NodeMasks | None = None,
        edit: Callable[[torch.Tensor], None] | None = None,
    ) -> StepDone:
        """Choose (of what ``allowed`` says), accept, update the state, sync.

        ``edit`` changes the logits; it is no part of a graph.
        """
        rows, tree, draft_len, layout = start.rows, start.tree, start.draft_len, start.layout
        slots, query_lens = rows.slots, start.query_lens
        num_rows, num_nodes = tree.tokens.shape
        logits = self._model.logits(start.hidden)  # until the end: who wants logprobs reads them then
        if edit is not None:
            edit(logits)
        choice, faulty = self._choose(rows, tree, logits, layout, allowed)
        parents = None if tree.mask is None else tree.parents
        if self._simulated is not None and draft_len:
            self._simulated.rewrite(tree.tokens, choice, rows.root, slots, parents)
        state = self._state
        accepted = Accepted.make(num_rows, min(draft_len + 1, num_nodes), slots.device)
        of_slots = SlotRows(state.seq_len, state.next_token, self._sampler.states.draft_cap, PAD_SLOT)
        lens = None if query_lens is None else query_lens.of_rows
        accept(
            tree.tokens, choice, faulty, slots, rows.root, of_slots, accepted,
            parents=parents, query_lens=lens, pdl=rows.pdl,
        )  # fmt: skip
        self._sampler.count_rows(slots, accepted.tokens, accepted.counts)
        if tree.mask is not None:
            table, size = state.page_table, self._pool.page_size
            for kept in self._pool.tensors:
                move_path(kept, accepted.path, accepted.counts, slots, rows.root, table, size)
        token_of = None if layout is None else layout.token_of
        if self._drafter is not None:
            aux = start.hidden[:, :0] if start.aux is None else start.aux  # of one that reads none
            self._drafter.sync(rows, aux, accepted, tree.mask is not None, token_of)
        tokens, path = accepted.tokens, accepted.path
        trace = StepTrace(logits, start.hidden, tokens, path, num_nodes, line_of=token_of, place_of=token_of)
        return StepDone(accepted.packed, trace)

    def _begin(self, slots: torch.Tensor, draft_len: int) -> tuple[Rows, DraftTree]:
        """Read the state; draft. A chain's parents and depths are left out: nothing reads them."""
        num_rows, device = slots.shape[0], slots.device
        num_nodes = draft_len + 1
        if draft_len:
            assert self._spec is not None
            num_nodes = self._spec.num_nodes(draft_len)
        root = torch.empty(num_rows, dtype=torch.int64, device=device)
        tokens = torch.zeros(num_rows, draft_len + 1, dtype=torch.int64, device=device)
        rows = Rows(slots, root, num_rows * num_nodes <= MAX_PDL_TOKENS)
        begin_rows(slots, self._state.seq_len, self._state.next_token, root, tokens, pdl=rows.pdl)
        tree = None
        if draft_len:
            assert self._drafter is not None, "a speculative step without a drafter"
            tree = self._drafter.draft(rows, tokens, draft_len)
        return rows, tree or DraftTree(tokens, tokens, tokens, None)

    def _forward(
        self, rows: Rows, tree: DraftTree, layout: Layout | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target on every node: hidden [R * N, H], aux [R * N, num_aux * H] with a drafter; [T, …] with a
        layout.
        """
        num_nodes, ids, ragged = tree.tokens.shape[1], tree.tokens.reshape(-1), None
        if layout is not None:
            ids, positions = layout.ids, layout.positions
            ragged = RaggedQueries(layout.query_start, layout.lines)
        elif num_nodes == 1:
            positions = rows.root
        elif tree.mask is None:
            positions = (rows.root[:, None] + torch.arange(num_nodes, device=rows.root.device)).reshape(-1)
        else:
            positions = (rows.root[:, None] + tree.depths).reshape(-1)
        block = Block.CAUSAL if tree.mask is None else Block.TREE
        # Lengths are read on the device: no bound is needed.
        attention = self._backend.decode(
            DecodeRows(rows.slots, rows.root, 0, num_nodes, block, tree.mask, ragged)
        )
        aux_layers = self._drafter.aux_layers if self._drafter else ()
        live = None
        if self._model.has_experts:
            row = torch.arange(len(ids), device=ids.device) if layout is None else layout.lines
            live = rows.slots[row // num_nodes] != PAD_SLOT
        return self._model.forward(ids, positions, attention, aux_layers, live)

    def _choose(
        self,
        rows: Rows,
        tree: DraftTree,
        logits: torch.Tensor,
        layout: Layout | None,
        allowed: NodeMasks | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token after every node, and whether its logits were broken: [R, N] each. What they are for
        nodes that were not verified means nothing.
        """
        num_nodes, is_tree = tree.tokens.shape[1], tree.mask is not None
        kind = Depths.TREE if is_tree else Depths.CHAIN
        lines = None if layout is None else layout.lines
        nodes = NodeRows(
            rows.slots, rows.root, num_nodes, kind, tree.depths if is_tree else None, lines=lines
        )
        choice, faulty = self._sampler.choose_nodes(logits, nodes, tree.tokens, tree.mask, allowed)
        return (choice, faulty) if layout is None else (choice[layout.token_of], faulty[layout.token_of])


def _laid_out(rows: Rows, tree: DraftTree, query_lens: QueryLens) -> Layout:
    assert tree.mask is None, "the nodes of a tree are verified together"
    num_rows, num_nodes = tree.tokens.shape
    layout = Layout.make(num_rows, num_nodes, query_lens.total, rows.root.device)
    return lay_out(tree.tokens, rows.root, query_lens.of_rows, layout, pdl=rows.pdl)
