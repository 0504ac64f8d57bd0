"""Which places the rows of a step see, whatever lies there: index arithmetic of the plain backends.

A place that a row must not see may hold anything, NaN included, and a masked value is still multiplied
(by 0): so every such place is *redirected* to the row's own position 0 before the gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows, pool_places

SHORT_ROW = 64  # rows up to so many places are never taken apart


@dataclass(frozen=True, slots=True)
class SeenPlaces:
    """Of R rows with Q queries each. W columns are gathered; column w is position w of its row."""

    index: torch.Tensor  # [R, W] int64 places
    seen: torch.Tensor  # [R, Q, W] bool
    write: torch.Tensor | None  # [R * Q] int64 places of the queries; None: they write nothing


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Of one prefill chunk: ``start`` places are in the cache before it."""

    start: int
    places: torch.Tensor  # [start + length] int64

    @property
    def length(self) -> int:
        return len(self.places) - self.start

    def seen(self) -> torch.Tensor:
        """[length, start + length] bool, causal."""
        positions = torch.arange(len(self.places), device=self.places.device)
        return positions <= positions[self.start :, None]


class PagedRows:
    """Looks places up in a page table, which has another owner."""

    def __init__(self, page_table: torch.Tensor, page_size: int) -> None:
        self.page_table = page_table  # [slots, max_pages] int32
        self.page_size = page_size

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool places of (slot, position) pairs; same shape as its arguments, int64."""
        return pool_places(self.page_table, self.page_size, slots, positions)

    def decode(self, rows: DecodeRows) -> SeenPlaces:
        num_queries = rows.query_len
        if rows.block is Block.NONE:
            index, seen = self.base(rows.slots, rows.base_len, width(rows.base_len, rows.base_len_bound))
            return SeenPlaces(index, seen[:, None].expand(-1, num_queries, -1), None)
        columns = width(rows.base_len, rows.base_len_bound) + num_queries
        index, _ = self.base(rows.slots, rows.base_len + num_queries, columns)
        own = rows.base_len[:, None] + torch.arange(num_queries, device=rows.base_len.device)  # [R, Q]
        write = self.places(rows.slots[:, None].expand_as(own), own)  # [R, Q]
        return SeenPlaces(index, _block_mask(rows, own, columns), write.flatten())

    def prefill(self, rows: PrefillRows) -> list[ChunkPlaces]:
        chunks = []
        for slot, start, length in zip(rows.slots, rows.starts, rows.query_lens, strict=True):
            positions = torch.arange(start + length, device=self.page_table.device)
            chunks.append(ChunkPlaces(start, self.places(torch.full_like(positions, slot), positions)))
        return chunks

    def base(
        self, slots: torch.Tensor, lens: torch.Tensor, columns: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places [R, W] int64 of positions 0 … W-1, redirected from ``lens`` on; and which are seen."""
        positions = torch.arange(columns, device=slots.device)  # [W]
        seen = positions < lens[:, None]  # [R, W]
        shown = torch.where(seen, positions, 0)
        return self.places(slots[:, None].expand_as(shown), shown), seen


def width(lens: torch.Tensor, bound: int) -> int:
    """Columns to gather. Reading a length costs nothing on a CPU; elsewhere the bound must do."""
    return int(lens.max()) if lens.device.type == "cpu" else bound


def parts_by_length(rows: DecodeRows) -> list[tuple[torch.Tensor, DecodeRows]]:
    """Query tokens [T'] int64 and rows of each part; empty: they stay together."""
    parts = []
    for group in _groups_by_length(rows.base_len):
        index = torch.tensor(group)  # [R'] rows
        tokens = (index[:, None] * rows.query_len + torch.arange(rows.query_len)).flatten()
        parts.append((tokens, _take(rows, index)))
    return parts if len(parts) > 1 else []


def last_seen(seen: torch.Tensor, window: int) -> torch.Tensor:
    """seen: [..., W] bool -> only the last ``window`` places of each query, its own included.

    A query sees one place of each position up to its own, in order, also in a tree: so the places
    counted are the positions.
    """
    if seen.shape[-1] <= window:
        return seen
    from_here_on = seen.flip(-1).cumsum(-1).flip(-1)  # [..., W]
    return seen & (from_here_on <= window)


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores: 0 or -inf. Made once a step; a bool mask is converted every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


AttendSingly = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""query tokens [N], their places [N, W], seen [N, 1, W] bool -> [N, …]."""


def put_right(
    out: torch.Tensor,  # [R * Q, …]
    index: torch.Tensor,  # [R, W] int64 places
    seen: torch.Tensor,  # [R, Q, W] bool
    attend: AttendSingly,
) -> None:
    """Put right what a draft that breaks the model did to the queries before it.

    They mask what it wrote, but a masked NaN is NaN. So the queries of rows that are not finite are
    attended to one by one, each with all that it must not see redirected.
    """
    # Reading this costs nothing on a CPU; elsewhere it would stop the step.
    if seen.shape[1] == 1 or out.device.type != "cpu" or math.isfinite(out.sum(dtype=torch.float32).item()):
        return
    _attend_apart(out, index, seen, attend)


def _attend_apart(out: torch.Tensor, index: torch.Tensor, seen: torch.Tensor, attend: AttendSingly) -> None:
    num_rows, num_queries, _ = seen.shape
    rows = (~out.reshape(num_rows, -1).sum(dim=1, dtype=torch.float32).isfinite()).nonzero()[:, 0]
    apart = seen[rows].flatten(0, 1)  # [R' * Q, W]
    places = index[rows].repeat_interleave(num_queries, dim=0)
    query = (rows[:, None] * num_queries + torch.arange(num_queries)).flatten()
    out[query] = attend(query, torch.where(apart, places, places[:, :1]), apart[:, None])


def _groups_by_length(lens: torch.Tensor) -> list[list[int]]:
    """Rows that are padded to one width: all of them, unless that is more than twice what there is."""
    if lens.device.type != "cpu":
        return []
    lens_cpu = lens.tolist()
    if len(lens_cpu) * max(lens_cpu) <= 2 * sum(lens_cpu) + len(lens_cpu) * SHORT_ROW:
        return []
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lens_cpu):
        groups.setdefault(max(length, SHORT_ROW).bit_length(), []).append(row)
    return list(groups.values())


def _take(rows: DecodeRows, index: torch.Tensor) -> DecodeRows:
    mask = None if rows.tree_mask is None else rows.tree_mask[index]
    return DecodeRows(
        rows.slots[index], rows.base_len[index], rows.base_len_bound, rows.query_len, rows.block, mask
    )


def _block_mask(rows: DecodeRows, own: torch.Tensor, columns: int) -> torch.Tensor:
    """[R, Q, W] bool. ``own`` [R, Q] is where the queries are stored."""
    positions = torch.arange(columns, device=own.device)  # [W]
    if rows.block is Block.CAUSAL:
        return positions <= own[:, :, None]
    assert rows.tree_mask is not None
    in_base = (positions < rows.base_len[:, None])[:, None]  # [R, 1, W]
    node = positions - rows.base_len[:, None]  # [R, W]
    in_block = (node >= 0) & (node < rows.query_len)
    node = node.clamp(0, rows.query_len - 1)[:, None].expand(-1, rows.query_len, -1)  # [R, Q, W]
    return in_base | (rows.tree_mask.gather(2, node) & in_block[:, None])
