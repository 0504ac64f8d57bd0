"""Drafts without a draft model: what followed the last occurrence of the latest tokens (prompt lookup).

Everything is on the device, so a step needs nothing from the host, and its drafts are a function of the
request's tokens alone: neither the mode of the steps before nor who else is in the batch changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from sglang.srt.model_executor.drafter import DraftContext, DraftTree, chain
from sglang.srt.model_executor.step_plan import SlotAdmission
from sglang.srt.speculative.history import TokenHistory

LONGEST_MATCH: Final = 12
"""Tokens compared. Of several places where as many agree, the latest is taken."""


class NgramWorker:
    """Implements ``Drafter`` for chains."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, history: TokenHistory) -> None:
        self._history = history

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        self._history.admit(admissions)

    def draft(self, ctx: DraftContext, draft_len: int) -> DraftTree:
        ids = self._history.ids[ctx.slots, : ctx.seq_len_bound + 1]  # [R, W], x_0 … x_L and what was before
        last = ctx.seq_len[:, None]  # [R, 1]: L
        match = _latest_match(ids, last)  # [R, 1]
        # Past the end of the text the guess goes on with its own beginning, as a loop would.
        step = torch.arange(draft_len, device=ids.device) % (last - match)  # [R, k]
        drafts = ids.gather(1, match + 1 + step).clamp_(min=0)
        return chain(torch.cat((ctx.next_token[:, None], drafts), dim=1))

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def sync(
        self, next_ids: torch.Tensor, features: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        self._history.append(slots, positions, next_ids)


def _latest_match(ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """[R, 1] int64: the place before ``last`` whose tokens, up to it, agree with the latest ones longest.

    Where nothing agrees: the place just before ``last``, so that the latest token is guessed again.
    """
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # [R, W]
    agreeing = torch.zeros_like(ids)  # how many tokens, from each place backwards
    still = places < last
    for back in range(LONGEST_MATCH):
        token = ids.gather(1, (last - back).clamp(min=0))  # [R, 1]
        at_place = ids.gather(1, (places - back).clamp(min=0))
        still = still & (at_place == token) & (token >= 0) & (places >= back)
        agreeing += still
    rank = torch.where(places < last, agreeing * ids.shape[1] + places, -1)
    return rank.argmax(dim=1, keepdim=True)
