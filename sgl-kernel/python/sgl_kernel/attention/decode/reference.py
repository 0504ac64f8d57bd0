"""What decode attention and its plan mean, in plain PyTorch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sgl_kernel.attention.decode.plan import DecodePlan

UNIT = 16


def row_chunks(lens: list[int], budget: int, min_chunk: int, unit: int = UNIT) -> list[int]:
    """Chunks of each row: the shortest common chunk that needs at most ``budget`` in all.

    At least one a row, and a chunk of at least ``min_chunk`` places.
    """
    units = -(-min_chunk // unit)
    while sum(_chunks(length, units * unit) for length in lens) > budget:
        units += 1
    return [_chunks(length, units * unit) for length in lens]


def _chunks(length: int, chunk: int) -> int:
    return max(1, -(-length // chunk))


def plan_decode_ref(plan: DecodePlan) -> None:
    """Fill the plan's items, places and bits."""
    heads, view = plan.shape.num_kv_heads, plan.view
    rows = list(zip(plan.slots.tolist(), plan.base_lens.tolist(), strict=True))
    first = 1 if view.extra else 0  # the first query's own place
    begins = [max(0, base + first - view.window) if slot and view.window else 0 for slot, base in rows]
    ends = [base + view.extra if slot else 0 for slot, base in rows]
    lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
    counts = row_chunks(lens, plan.num_items // heads, plan.min_chunk)
    items: list[list[int]] = []
    partial = 0
    for row, (begin, length, count) in enumerate(zip(begins, lens, counts, strict=True)):
        chunk = math.ceil(length / count / UNIT) * UNIT
        slot = rows[row][0]
        for head in range(heads):
            for i in range(count):
                end = begin + min(length, (i + 1) * chunk)
                items.append([row, head, begin + i * chunk, end, slot, i, count, partial + head * count])
        partial += heads * count if count > 1 else 0
    plan.items[:, 0] = -1
    plan.items[: len(items)] = torch.tensor(items, dtype=torch.int32)
    _write_places(plan)
    if view.mask is not None:
        node = torch.arange(view.extra, device=plan.bits.device)
        mask = last_seen(view.mask.flatten(0, 1), view.window).to(torch.int64)  # [R * Q, extra]
        for word in range(view.words):
            here = node // 64 == word
            plan.bits[:, word] = (mask[:, here] << (node[here] % 64)).sum(dim=1)


def _write_places(plan: DecodePlan) -> None:
    view, num_rows = plan.view, plan.slots.shape[0]
    query = torch.arange(view.query_len, device=plan.places.device)
    if view.scratch:
        rows = torch.arange(num_rows, device=plan.places.device)
        plan.places[:] = (rows[:, None] * plan.scratch_cap + view.write_start + query).flatten()
    elif view.writes:
        positions = plan.base_lens[:, None] + query  # [R, Q]
        plan.places[:] = pool_places(plan, plan.slots[:, None].expand_as(positions), positions).flatten()


def pool_places(plan: DecodePlan, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pool places of (slot, position) pairs, int64."""
    size = plan.shape.page_size
    return plan.page_table[slots, positions // size].to(torch.int64) * size + positions % size


def decode_attention_ref(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: DecodePlan,
    kv_scale: torch.Tensor | None,
    scratch: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``decode_attention``, a row at a time, in float64 for float64 inputs and float32 otherwise."""
    view, shape = plan.view, plan.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = view.starts(plan.slots.shape[0])
    for row, (slot, base) in enumerate(zip(plan.slots.tolist(), plan.base_lens.tolist(), strict=True)):
        if slot == 0:
            continue
        own_tokens = slice(starts[row], starts[row + 1])
        num_queries = starts[row + 1] - starts[row]
        extra = 0 if view.scratch else view.extra - view.query_len + num_queries if view.writes else 0
        positions = torch.arange(base + extra, device=q.device)
        own = kv[pool_places(plan, torch.full_like(positions, slot), positions)]  # [len, nkv, 2, d]
        if view.scratch:
            assert scratch is not None
            own = torch.cat((own, scratch[row, : view.extra]))
        seen = torch.ones(num_queries, own.shape[0], dtype=torch.bool, device=q.device)
        if view.causal:
            seen[:, base:] = torch.ones_like(seen[:, base:]).tril()
        elif view.mask is not None:
            seen[:, base:] = view.mask[row]
        seen = last_seen(seen, view.window)
        result = attend(q[own_tokens], own, seen, shape.head_dim**-0.5, kv_scale, sinks)
        out[own_tokens] = result.to(q.dtype)
    return out


def last_seen(seen: torch.Tensor, window: int) -> torch.Tensor:
    """seen: [..., places] bool -> only the last ``window`` that each query sees; 0: all."""
    if window == 0:
        return seen
    from_here_on = seen.flip(-1).cumsum(-1).flip(-1)  # [..., places]
    return seen & (from_here_on <= window)


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    kv_scale: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [Q, nq, d]; kv: [places, nkv, 2, d]; seen: [Q, places]; kv_scale: [nkv, 2]; sinks: [nq], scores of
    a place without a value -> [Q, nq, d].

    A value that is not finite breaks the queries that see it and no other: 0 times NaN is NaN, so it
    is taken out, and the scores at its place are NaN instead.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // kv.shape[1]
    k, v = kv.to(compute).repeat_interleave(group, dim=1).unbind(2)  # [places, nq, d]
    if kv_scale is not None:
        factors = kv_scale.to(compute).repeat_interleave(group, dim=0)  # [nq, 2]
        k, v = k * factors[:, :1], v * factors[:, 1:]
    broken = ~v.isfinite().all(dim=2)  # [places, nq]
    scores = torch.einsum("qhd,nhd->hqn", q.to(compute), k) * scale
    scores = scores.masked_fill(broken.T[:, None], math.nan).masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(compute)[:, None, None].expand(-1, len(q), 1)), dim=2)
    weights = scores.softmax(-1)[:, :, : len(kv)]  # [nq, Q, places]
    return torch.einsum("hqn,nhd->qhd", weights, v.masked_fill(broken[:, :, None], 0))
