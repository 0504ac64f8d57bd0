"""Attention as loops in float64, to compare backends with; and pages handed out at random."""

from __future__ import annotations

import torch


def attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """One query. q: [nq, d]; k, v: [places, nkv, d]; seen: [places] bool; sinks: [nq] -> [nq, d] float64."""
    q, k, v = q.double(), k.double()[seen], v.double()[seen]
    group = q.shape[0] // k.shape[1]
    heads = []
    for h in range(q.shape[0]):
        scores = k[:, h // group] @ q[h] * q.shape[1] ** -0.5
        sink = scores.new_empty(0) if sinks is None else sinks[h : h + 1].double()
        parts = torch.cat((scores, sink)).softmax(0)
        heads.append(parts[: len(scores)] @ v[:, h // group])
    return torch.stack(heads)


def random_page_table(
    num_slots: int, max_pages: int, num_pages: int, generator: torch.Generator
) -> torch.Tensor:
    """[num_slots + 1, max_pages] int32: slot 0 on the pad page, the others on pages of their own."""
    assert num_slots * max_pages <= num_pages
    pages = torch.randperm(num_pages, generator=generator)[: num_slots * max_pages] + 1
    table = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32)
    table[1:] = pages.view(num_slots, max_pages)
    return table
