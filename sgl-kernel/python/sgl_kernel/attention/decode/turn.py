"""What decode attention turns and writes itself, instead of a launch of ``rope_cache_write`` ahead of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sgl_kernel.rope.ops import CachePlaces, HeadNorms, RopeTables, TokenRows, rope_cache_write_ref

if TYPE_CHECKING:
    from sgl_kernel.attention.decode.plan import DecodePlan


MAX_ROWS = 32  # of a tile
MAX_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Turn:
    """A layer's product of T tokens before norms and rope, and what turns it."""

    qkv: (
        torch.Tensor
    )  # [T, (nq + 2 * nkv) * d], T as the view says; [T, nq * d] with a view that writes nothing
    tables: RopeTables
    positions: torch.Tensor  # [T] int64 rope positions; in a tree not those where K and V are stored
    norms: HeadNorms | None = None
    pdl: bool = False  # programmatic dependence on the kernel ahead, whatever the plan says


def can_turn(plan: DecodePlan) -> bool:
    """Whether ``decode_attention`` takes a ``Turn``: by shapes alone, so that a graph stays good.

    With several tiles one would read K and V that another has yet to write; and in 128 registers turning
    64 rows, or norms of heads of 256, spill 56 to 288 bytes.
    """
    fits = plan.config.block_m <= MAX_ROWS and plan.shape.head_dim <= MAX_HEAD_DIM
    return fits and plan.num_tiles == 1


def turned_ref(turn: Turn, kv: torch.Tensor, plan: DecodePlan, kv_scale: torch.Tensor | None) -> torch.Tensor:
    """Write K and V to ``kv`` (of a view with scratch places the scratch's rows in a row); q [T, nq, d]."""
    shape, view = plan.shape, plan.view
    q = turn.qkv.new_empty(turn.qkv.shape[0], shape.num_heads * shape.head_dim)
    starts = torch.tensor(view.starts(plan.slots.shape[0]), device=q.device)
    lens = starts.diff()
    slots = plan.slots.repeat_interleave(lens)
    asked = torch.arange(view.query_len, device=q.device) < lens[:, None]  # [R, Q]
    places = plan.places.view(-1, view.query_len)[asked] if view.writes else plan.places
    rope_cache_write_ref(
        turn.qkv,
        shape.num_heads,
        shape.num_kv_heads if view.writes else 0,
        turn.tables,
        TokenRows(slots, turn.positions),
        CachePlaces(kv, places=places, kv_scale=kv_scale) if view.writes else None,
        turn.norms,
        q,
    )
    return q.view(-1, shape.num_heads, shape.head_dim)
