"""The input of one forward, the same for every mode.

Each row has a *root*, its last known token, and drafts hanging from it (none in a plain step). A
prefill chunk is a row too: its last token is the root, the tokens before it ride along. So one
function can finish every kind of step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.layers.attention.base import LayerAttention
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.step_plan import PrefillChunk
from sglang.srt.utils.upload import upload


@dataclass(frozen=True, slots=True)
class KnownPairs:
    """Prompt tokens before a chunk's last one: each is followed by an id that is known."""

    query: torch.Tensor  # [P] int64 index among the step's T tokens
    next_ids: torch.Tensor  # [P] int64
    slots: torch.Tensor  # [P] int64
    positions: torch.Tensor  # [P] int64


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
    known: KnownPairs | None = None

    @property
    def num_nodes(self) -> int:
        return self.tree.tokens.shape[1]


def roots(tokens: torch.Tensor) -> DraftTree:
    """[R] int64 -> trees of one node each."""
    nothing = torch.zeros_like(tokens)[:, None]
    return DraftTree(tokens[:, None], nothing - 1, nothing, None)


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """The flattened tokens of prefill chunks, after ``num_before`` tokens of decode rows."""

    token_ids: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64
    last: torch.Tensor  # [chunks] int64 index of each chunk's last token among the step's tokens
    known: KnownPairs  # of all tokens but the last ones


def flatten_chunks(chunks: Sequence[PrefillChunk], num_before: int, device: torch.device) -> ChunkTokens:
    """Host lists of a plan's chunks as tensors; every chunk has at least one token."""
    ids: list[int] = []
    places: list[int] = []
    last: list[int] = []
    known: list[tuple[int, int, int, int]] = []  # query, next id, slot, position
    for chunk in chunks:
        assert chunk.token_ids, "a prefill chunk without tokens"
        first = num_before + len(ids)
        ids += chunk.token_ids
        places += range(chunk.start, chunk.start + len(chunk.token_ids))
        last.append(num_before + len(ids) - 1)
        known += [
            (first + i, next_id, chunk.slot, chunk.start + i) for i, next_id in enumerate(chunk.token_ids[1:])
        ]
    pairs = upload(known, torch.int64, device).view(-1, 4)
    return ChunkTokens(
        upload(ids, torch.int64, device),
        upload(places, torch.int64, device),
        upload(last, torch.int64, device),
        KnownPairs(*pairs.unbind(1)),
    )
