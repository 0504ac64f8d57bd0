"""The input of one forward, the same for every mode.

Each row has a *root*, its last known token, and drafts hanging from it (none in a plain step). A
prefill chunk is a row too: its last token is the root, the tokens before it ride along. So one
function can finish every kind of step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from sglang.srt.layers.attention.base import LayerAttention
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.step_plan import StepPlan
from sglang.srt.utils.upload import ints, ranges, upload_all


@dataclass(frozen=True, slots=True)
class Pairs:
    """For a drafter's cache: every token of a prefill step with the id that follows it."""

    next_ids: torch.Tensor  # [T] int64; 0 at the roots, whose next ids the step itself finds
    slots: torch.Tensor  # [T] int64


@dataclass(frozen=True, slots=True)
class StepBatch:
    """R rows of N nodes; T tokens go through the target."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    attention: LayerAttention
    slots_cpu: tuple[int, ...]  # length R
    slots: torch.Tensor  # [R] int64
    root_position: torch.Tensor  # [R] int64
    tree: DraftTree  # [R, N]
    query: torch.Tensor  # [R, N] int64: index of each node among the T tokens
    num_depths: int = 1  # host: depths of the trees, the root's counted
    given: torch.Tensor | None = None  # [R] int64 next ids known already; None: every row chooses
    choosing_cpu: tuple[int, ...] = ()  # rows that choose, where some ids are given
    choosing: torch.Tensor | None = None  # [R'] int64, the same
    is_prefill: bool = False  # more tokens than nodes
    pairs: Pairs | None = None  # of a prefill step with a drafter

    @property
    def num_nodes(self) -> int:
        return self.tree.tokens.shape[1]


def roots(tokens: torch.Tensor) -> DraftTree:
    """[R] int64 -> trees of one node each."""
    nothing = torch.zeros_like(tokens)[:, None]
    return DraftTree(tokens[:, None], nothing - 1, nothing, None)


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """What the host knows of a step with C chunks of S tokens after D decode rows; R = D + C, T = D + S."""

    slots_cpu: tuple[int, ...]  # length R
    slots: torch.Tensor  # [R] int64
    query: torch.Tensor  # [R] int64 index of each row's root among the T tokens
    token_ids: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64
    root_ids: torch.Tensor  # [C] int64, the chunks' last tokens
    root_positions: torch.Tensor  # [C] int64
    given: torch.Tensor | None  # [R] int64, as in StepBatch
    choosing_cpu: tuple[int, ...]
    choosing: torch.Tensor  # [R'] int64
    pairs: Pairs | None


def prefill_inputs(plan: StepPlan, device: torch.device, with_pairs: bool) -> PrefillInputs:
    """All of it in one copy to the device, made without a Python object for every token."""
    chunks, num_decode = plan.prefill, len(plan.decode_slots)
    assert all(chunk.token_ids for chunk in chunks), "a prefill chunk without tokens"
    slots_cpu = plan.decode_slots + tuple(c.slot for c in chunks)
    next_ids = (None,) * num_decode + tuple(c.next_id for c in chunks)
    choosing_cpu = tuple(row for row, next_id in enumerate(next_ids) if next_id is None)
    lens = ints((len(c.token_ids) for c in chunks), len(chunks))
    starts = ints((c.start for c in chunks), len(chunks))
    ids = ints(chain.from_iterable(c.token_ids for c in chunks), int(lens.sum()))
    last = lens.cumsum() - 1  # [C], among the chunks' tokens
    slots = ints(slots_cpu, len(slots_cpu))
    parts = [
        slots,
        np.concatenate([np.arange(num_decode), last + num_decode]),
        ids,
        ranges(starts, lens),
        ids[last],
        starts + lens - 1,
        ints((next_id or 0 for next_id in next_ids), len(next_ids)),
        ints(choosing_cpu, len(choosing_cpu)),
    ]
    if with_pairs:
        following = np.append(ids[1:], 0)
        following[last] = 0
        parts.append(np.concatenate([np.zeros(num_decode, np.int64), following]))
        parts.append(np.concatenate([slots[:num_decode], np.repeat(slots[num_decode:], lens)]))
    sent = upload_all(parts, device)
    return PrefillInputs(
        slots_cpu=slots_cpu,
        slots=sent[0],
        query=sent[1],
        token_ids=sent[2],
        positions=sent[3],
        root_ids=sent[4],
        root_positions=sent[5],
        given=sent[6] if len(choosing_cpu) < len(slots_cpu) else None,
        choosing_cpu=choosing_cpu,
        choosing=sent[7],
        pairs=Pairs(sent[8], sent[9]) if with_pairs else None,
    )
