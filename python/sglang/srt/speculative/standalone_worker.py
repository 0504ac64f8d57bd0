"""Drafts by another, smaller model with the same vocabulary and a cache of its own.

A plain step does nothing for it but keep the tokens: the next speculative step runs the model on all that
its cache lacks. What the cache holds is known from the ids whose entries were written, so a request that was
decoded plainly, a rejected draft and a slot's next life need no word from anybody. A prefix hit shares the
target's cache alone: the draft model reads such a prompt itself, from its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from sglang.srt.layers.attention.base import AttentionBackend, DecodeRows, PrefillRows
from sglang.srt.model_executor.drafter import DraftContext, DraftTree, chain
from sglang.srt.model_executor.step_plan import SlotAdmission
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.sampling.states import SamplingStates
from sglang.srt.speculative.history import TokenHistory

CHUNK: Final = 512
"""Most tokens of a row that are caught up with at once."""

_NOTHING: Final = -1  # where the cache holds no entry

SHORT: Final = 8
"""Up to so many tokens behind, all rows go through the model together, each with as many queries."""


class StandaloneWorker:
    """Implements ``Drafter`` for chains, on a CPU: it reads lengths on the host."""

    aux_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,  # bound to the model's pool, which has the target's pages
        states: SamplingStates,
        history: TokenHistory,
    ) -> None:
        self._model = model
        self._backend = backend
        self._states = states
        self._history = history
        self._cached = torch.full_like(history.ids, _NOTHING)  # ids whose entries the model's cache holds
        self._target_ids = torch.arange(model.config.vocab_size, device=history.ids.device)

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        self._history.admit(admissions)
        for admission in admissions:
            self._cached[admission.slot] = _NOTHING

    def draft(self, ctx: DraftContext, draft_len: int) -> DraftTree:
        tokens = [ctx.next_token]
        hidden = self._catch_up(ctx)
        for i in range(1, draft_len + 1):
            if i > 1:
                position = ctx.seq_len + (i - 1)
                rows = DecodeRows(ctx.slots, position, ctx.seq_len_bound + i - 1, 1)
                hidden = self._forward(tokens[-1][:, None], ctx.slots, position, rows)
            logits = self._model.logits(hidden)
            if ctx.sampled:
                index = ctx.seq_len + i
                logits = self._states.draft_scores(logits[:, None], ctx.slots, index, self._target_ids)[:, 0]
            tokens.append(logits.argmax(dim=-1))
        return chain(torch.stack(tokens, dim=1))

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def sync(
        self, next_ids: torch.Tensor, features: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        self._history.append(slots, positions, next_ids)

    def _catch_up(self, ctx: DraftContext) -> torch.Tensor:
        """The model on everything up to x_L that its cache lacks: [R, H], hidden states at L."""
        ends = (ctx.seq_len + 1).tolist()
        slots = ctx.slots.tolist()
        starts = [self._num_cached(slot, end - 1) for slot, end in zip(slots, ends, strict=True)]
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        if longest <= min(SHORT, *ends):
            base = ctx.seq_len + 1 - longest
            columns = base[:, None] + torch.arange(longest, device=base.device)  # [R, Q]
            ids = self._history.ids[ctx.slots[:, None], columns]
            rows = DecodeRows(ctx.slots, base, ctx.seq_len_bound, longest)
            return self._forward(ids, ctx.slots, base, rows).view(len(slots), longest, -1)[:, -1]
        last = [self._read(*row) for row in zip(slots, starts, ends, strict=True)]
        return torch.cat(last)

    def _num_cached(self, slot: int, most: int) -> int:
        """Leading tokens of a slot whose entries are in the cache, ``most`` at most."""
        same = self._cached[slot, :most] == self._history.ids[slot, :most]
        return most if bool(same.all()) else int(same.to(torch.int8).argmin())

    def _read(self, slot: int, start: int, end: int) -> torch.Tensor:
        """Tokens ``start … end - 1`` of one slot, in chunks: [1, H] of the last one."""
        hidden = torch.empty(0)
        for begin in range(start, end, CHUNK):
            stop = min(begin + CHUNK, end)
            ids, positions = self._history.ids[slot, begin:stop], torch.arange(begin, stop)
            attention = self._backend.prefill(PrefillRows((slot,), (begin,), (stop - begin,)))
            hidden, _ = self._model.forward(ids, positions, attention)
            self._note(torch.tensor([slot]), torch.tensor([begin]), ids[None])
        return hidden[-1:]

    def _forward(
        self, ids: torch.Tensor, slots: torch.Tensor, start: torch.Tensor, rows: DecodeRows
    ) -> torch.Tensor:
        """ids: [R, Q], at ``start`` [R] and after -> [R * Q, H]."""
        columns = start[:, None] + torch.arange(ids.shape[1], device=start.device)
        hidden, _ = self._model.forward(ids.flatten(), columns.flatten(), self._backend.decode(rows))
        self._note(slots, start, ids)
        return hidden

    def _note(self, slots: torch.Tensor, start: torch.Tensor, ids: torch.Tensor) -> None:
        """Entries of ``ids`` [R, Q] were written; those after them were made with other tokens before."""
        places = torch.arange(self._cached.shape[1], device=start.device)
        own = self._cached[slots]  # [R, max_positions], a copy
        own.masked_fill_(places >= start[:, None], _NOTHING)
        own.scatter_(1, start[:, None] + torch.arange(ids.shape[1], device=start.device), ids)
        self._cached[slots] = own
