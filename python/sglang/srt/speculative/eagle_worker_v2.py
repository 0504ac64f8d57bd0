"""The drafter inside a worker, for draft models of one layer (EAGLE-3, arXiv 2503.01840; MTP heads): it
guesses, and keeps its cache exact.

The layer at position t reads the pair (token x_{t+1}, feature g_t) and guesses x_{t+2}. Within a
step, where the target has not been yet, its own output stands in for the feature. Nothing of a draft
outlives the step: the next sync writes the draft KV of committed positions from true features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.attention.base import Block, DecodeRows, DraftAttentionBackend, ScratchRows
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_executor.drafter import DraftContext, DraftTree, chain
from sglang.srt.model_executor.step_plan import SlotAdmission, SpecShape
from sglang.srt.models.draft_model import DraftModel
from sglang.srt.sampling.states import SamplingStates
from sglang.srt.speculative.tree import Frontier, TreeBuilder


class EAGLEWorkerV2:
    """Implements ``Drafter``: chains for topk 1, trees otherwise."""

    def __init__(
        self,
        model: DraftModel,
        pool: KVPool,  # the drafter's, which has the target's pages
        backend: DraftAttentionBackend,  # bound to ``pool``
        states: SamplingStates,
        spec: SpecShape,
        aux_layers: tuple[int, ...],
    ) -> None:
        self.aux_layers = aux_layers
        self._model = model
        self._pool = pool
        self._backend = backend
        self._states = states
        self._spec = spec

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """What it keeps of a slot is in the pool and the slot state."""

    def draft(self, ctx: DraftContext, draft_len: int) -> DraftTree:
        """``draft_len`` draft forwards; the draft KV on 0 … L-1 is only read."""
        assert draft_len >= 1
        return self._chain(ctx, draft_len) if self._spec.topk == 1 else self._tree(ctx, draft_len)

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        """[T, num_aux * H_target] -> [T, H_draft]."""
        return self._model.feature(aux)

    def sync(
        self,
        next_ids: torch.Tensor,  # [T] int64: x_{t+1}
        features: torch.Tensor,  # [T, H_draft]: g_t
        slots: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64: t
    ) -> None:
        """The draft cache of committed positions: all of the layer up to its last cache write."""
        places = self._backend.places(slots, positions)
        self._model.write(self._pool, places, next_ids, features, positions)

    def _open(self, ctx: DraftContext) -> torch.Tensor:
        """Forward 1, on the pair (x_L, g_{L-1}) at L-1: [R, H_draft].

        Its KV is there already (the last sync wrote it, and the page may be shared by now).
        """
        rows = DecodeRows(ctx.slots, ctx.seq_len, ctx.seq_len_bound, 1, Block.NONE)
        attention = self._backend.decode(rows)
        return self._model.layer(ctx.next_token, ctx.feature, ctx.seq_len - 1, attention, write=False)

    def _ranks(self, ctx: DraftContext, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """What guesses are ranked by: [R * N, H_draft] -> [R, N, V']. index: [R], of the token guessed."""
        logits = self._model.logits(hidden)
        logits = logits.view(len(index), -1, logits.shape[-1])
        if not ctx.sampled:
            return logits
        return self._states.draft_scores(logits, ctx.slots, index, self._model.target_ids)

    def _chain(self, ctx: DraftContext, draft_len: int) -> DraftTree:
        tokens = [ctx.next_token]
        hidden = self._open(ctx)
        for i in range(1, draft_len + 1):
            if i > 1:
                # At position L - 2 + i, seeing what is before it and itself.
                position = ctx.seq_len + (i - 2)
                rows = DecodeRows(ctx.slots, position, ctx.seq_len_bound + i - 2, 1)
                attention = self._backend.decode(rows)
                hidden = self._model.layer(tokens[-1], hidden, position, attention, write=True)
            ranks = self._ranks(ctx, hidden, ctx.seq_len + i)
            tokens.append(self._model.target_ids[ranks[:, 0].argmax(dim=-1)])
        return chain(torch.stack(tokens, dim=1))

    def _tree(self, ctx: DraftContext, draft_len: int) -> DraftTree:
        builder, token_ids, k = TreeBuilder(self._spec.topk), self._model.target_ids, self._spec.topk
        hidden = self._open(ctx)[:, None, :]  # [R, nodes, H_draft] of the level above
        frontier = builder.add_roots_children(
            self._ranks(ctx, hidden.flatten(0, 1), ctx.seq_len + 1), token_ids
        )
        seen = torch.zeros(len(ctx.slots), k, 0, dtype=torch.bool, device=ctx.slots.device)
        for i in range(2, draft_len + 1):
            hidden, seen = self._level(ctx, i, frontier, hidden, seen)
            ranks = self._ranks(ctx, hidden.flatten(0, 1), ctx.seq_len + i)
            frontier = builder.add_children(frontier, ranks, token_ids)
        return builder.build(ctx.next_token, self._spec.num_nodes(draft_len))

    def _level(
        self,
        ctx: DraftContext,
        i: int,
        frontier: Frontier,
        above: torch.Tensor,  # [R, nodes, H_draft] outputs of the level above
        seen: torch.Tensor,  # [R, k, S] bool scratch places the nodes above see
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward i on the k frontier nodes of every row; their KV goes to scratch places."""
        num_rows, k = frontier.tokens.shape
        hidden = above.gather(1, frontier.parent[:, :, None].expand(-1, -1, above.shape[-1]))
        inherited = seen.gather(1, frontier.parent[:, :, None].expand(-1, -1, seen.shape[-1]))
        itself = torch.eye(k, dtype=torch.bool, device=seen.device).expand(num_rows, k, k)
        mask = torch.cat([inherited, itself], dim=2)
        rows = ScratchRows(ctx.slots, ctx.seq_len, ctx.seq_len_bound, k, seen.shape[-1], mask)
        position = (ctx.seq_len + (i - 2)).repeat_interleave(k)
        attention = self._backend.scratch(rows)
        embed_ids = frontier.tokens.reshape(-1)
        out = self._model.layer(embed_ids, hidden.flatten(0, 1), position, attention, write=True)
        return out.view(num_rows, k, -1), mask
