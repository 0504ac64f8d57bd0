"""What an indexer's choice means, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_kernel.attention.decode.reference import pool_places

if TYPE_CHECKING:
    from sgl_kernel.attention.decode.plan import DecodePlan, View
    from sgl_kernel.attention.mla.indexing.plan import IndexPlan


def count_seen_ref(rows: DecodePlan, top_k: int, counts: torch.Tensor, ids: torch.Tensor) -> None:
    """Fill ``counts`` and ``ids`` of an ``IndexPlan``."""
    view, num_rows = rows.view, rows.slots.shape[0]
    extra = torch.full((num_rows, view.query_len), view.extra, device=counts.device)
    if view.causal:
        extra[:] = torch.arange(1, view.query_len + 1, device=counts.device)
    elif view.mask is not None:
        extra = view.mask.sum(dim=2)
    own = (rows.slots > 0)[:, None].expand_as(extra)
    seen = (rows.base_lens[:, None] + extra).clamp(max=top_k)
    counts[:] = seen.masked_fill(~own, 0).flatten()
    numbers = torch.arange(1, len(ids) + 1, device=ids.device)
    ids[:] = numbers.masked_fill(~own.flatten(), 0)


def choose_places_ref(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    plan: IndexPlan,
    scratch: torch.Tensor | None = None,
) -> None:
    """As ``choose_places``, a row at a time; the places in the order of their positions."""
    rows, view = plan.rows, plan.rows.view
    compute = torch.float64 if weights.dtype == torch.float64 else torch.float32
    for row, (slot, base) in enumerate(zip(rows.slots.tolist(), rows.base_lens.tolist(), strict=True)):
        if slot == 0:
            continue
        positions = torch.arange(base + (0 if view.scratch else view.extra), device=q.device)
        places = pool_places(rows, torch.full_like(positions, slot), positions)
        own = keys[places]  # [places, d]
        if scratch is not None:
            own = torch.cat((own, scratch[row, : view.extra]))
            nodes = torch.arange(view.extra, device=q.device)
            places = torch.cat((places, -1 - (row * rows.scratch_cap + nodes)))
        seen = seen_places(view, row, base, q.device)
        for query in range(view.query_len):
            token = row * view.query_len + query
            scores = index_scores(q[token], weights[token], own, compute)
            best = best_positions(scores.masked_fill(~seen[query], float("-inf")), plan.top_k)
            best = best[seen[query][best]]
            plan.chosen[token + 1, : len(best)] = places[best].to(torch.int32)


def seen_places(view: View, row: int, base: int, device: torch.device) -> torch.Tensor:
    """[Q, base + extra] bool: what the queries of a row see."""
    seen = torch.ones(view.query_len, base + view.extra, dtype=torch.bool, device=device)
    if view.causal:
        seen[:, base:] = torch.ones_like(seen[:, base:]).tril()
    elif view.mask is not None:
        seen[:, base:] = view.mask[row]
    return seen


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """q: [h, d]; weights: [h]; keys: [places, d] -> [places]."""
    dots = (keys.to(compute) @ q.to(compute).T).relu()  # [places, h]
    return dots @ weights.to(compute)


def best_positions(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """scores: [places] -> the positions of the ``top_k`` highest, ascending. Of equal ones the earlier is
    taken; one that is not a number comes before all others."""
    order = scores.nan_to_num(nan=float("inf"), posinf=torch.finfo(scores.dtype).max, neginf=float("-inf"))
    return order.argsort(descending=True, stable=True)[:top_k].sort().values
