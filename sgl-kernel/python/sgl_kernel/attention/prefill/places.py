"""Where in a paged cache the tokens of prefill chunks lie, from what the host knows, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """T tokens of R chunks."""

    token_slots: torch.Tensor  # [T] int64
    places: torch.Tensor  # [T] int64: where their K and V go
    page_ids: torch.Tensor | None  # [P] int32: the pages of a row's places, before the chunk too, row by row
    more: torch.Tensor | None  # [M] int64, what else was to be sent


def chunk_places(
    page_table: torch.Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
    lens: Sequence[int],
    page_size: int,
    *,
    with_pages: bool = False,
    more: Ints | None = None,
) -> ChunkPlaces:
    """Chunk r has lens[r] tokens of slot slots[r] from position starts[r]. page_table: [slots, max_pages]
    int32, contiguous.
    """
    slot, start, length = (np.array(values, dtype=np.int64) for values in (slots, starts, lens))
    width = page_table.shape[1]
    token_slots, positions = np.repeat(slot, length), ranges(start, length)  # [T]
    entries = token_slots * width + positions // page_size  # [T], in the flat page table
    parts = [token_slots, entries, positions % page_size]
    if with_pages:
        parts.append(ranges(slot * width, -(-(start + length) // page_size)))
    if more is not None:
        parts.append(more)
    sent = _upload(parts, page_table.device)
    table = page_table.view(-1)
    places = table[sent[1]].to(torch.int64)
    if page_size > 1:
        places = places.mul_(page_size).add_(sent[2])
    return ChunkPlaces(
        sent[0],
        places,
        table[sent[3]] if with_pages else None,
        None if more is None else sent[-1],
    )


def ranges(starts: Ints, lens: Ints) -> Ints:
    """start, start + 1, … start + len - 1 of each pair, one after the other."""
    ends = lens.cumsum()
    return np.repeat(starts - (ends - lens), lens) + np.arange(int(ends[-1]))


def _upload(parts: list[Ints], device: torch.device) -> list[torch.Tensor]:
    """All in one copy, without waiting for the device; each begins at a multiple of 16 bytes."""
    begins = list(accumulate((len(part) + len(part) % 2 for part in parts), initial=0))
    held = torch.empty(begins[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    host = held.numpy()
    for begin, part in zip(begins, parts, strict=False):
        host[begin : begin + len(part)] = part
    sent = held.to(device, non_blocking=True)
    return [sent[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=False)]
