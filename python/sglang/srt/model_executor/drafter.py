"""What the step function asks of a drafter. The class that answers is in ``speculative``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.model_executor.step_plan import SlotAdmission, StepPlan


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Rows that are about to draft. Everything is read from the slot state; nothing is kept."""

    slots: torch.Tensor  # [R] int64
    seq_len: torch.Tensor  # [R] int64: L
    seq_len_bound: int  # host upper bound of L
    next_token: torch.Tensor  # [R] int64: x_L
    feature: torch.Tensor  # [R, H_draft]: g_{L-1}
    sampled: bool  # host: some row has temperature > 0; False: every guess is a plain argmax


@dataclass(frozen=True, slots=True)
class DraftTree:
    """N nodes a row; node 0 is the root x_L. A chain is the tree whose parents are 0, 1, 2 …

    Parents come before their children; the children of one node have distinct tokens.
    """

    tokens: torch.Tensor  # [R, N] int64
    parents: torch.Tensor  # [R, N] int64; parents[:, 0] = -1
    depths: torch.Tensor  # [R, N] int64; depths[:, 0] = 0
    mask: torch.Tensor | None  # [R, N, N] bool ancestor-or-self; None: a chain


def chain(tokens: torch.Tensor) -> DraftTree:
    """[R, N] int64, the root's first: each hangs from the one before it."""
    depths = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    return DraftTree(tokens, depths - 1, depths, None)


class Drafter(Protocol):
    """Its cache of committed positions, if it has one, is exact whenever it drafts."""

    aux_layers: tuple[int, ...]
    """The target's layers whose *input* (residual stream) the drafter reads."""

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """Slots begin a new life, before the first chunk of their prefill."""
        ...

    def draft(self, ctx: DraftContext, draft_len: int) -> DraftTree:
        """Run ``draft_len`` draft forwards. Leaves the draft KV on 0 … L-1 as it was."""
        ...

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        """[T, len(aux_layers) * H_target] -> [T, H_draft]."""
        ...

    def sync(
        self,
        next_ids: torch.Tensor,  # [T] int64: x_{t+1}
        features: torch.Tensor,  # [T, H_draft]: g_t
        slots: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64: t
    ) -> None:
        """Take note of committed positions: what a layer writes to its cache (no attention, no MLP, no
        lm_head), or the tokens alone.
        """
        ...


class PlanReader(Protocol):
    """A draft model with a step of its own, ahead of the target's."""

    def read(self, plan: StepPlan) -> None:
        """Once for every plan, behind its admissions and page writes."""
        ...
