"""Which places an indexer chooses for each query (DSA; DeepSeek-V3.2, arXiv 2512.02556).

Among equal scores the earlier place is taken: a relu makes many scores exactly 0, and the choice must
not depend on how a step's rows lie in memory.
"""

from __future__ import annotations

from typing import Final

import torch

BLOCK_QUERIES: Final = 64
"""Queries of a row that are scored at once: each head's scores are there together."""


def index_scores(
    q: torch.Tensor,  # [R, Q, h, d]
    k: torch.Tensor,  # [R, W, d]
    weights: torch.Tensor,  # [R, Q, h]
) -> torch.Tensor:
    """[R, Q, W], in the weights' dtype."""
    q, k = q.to(weights.dtype), k.to(weights.dtype)
    parts = zip(q.split(BLOCK_QUERIES, dim=1), weights.split(BLOCK_QUERIES, dim=1), strict=True)
    return torch.cat([_scores(part, k, of_heads) for part, of_heads in parts], dim=1)


def _scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_rows, num_queries, num_heads, _ = q.shape
    dots = q.flatten(1, 2) @ k.transpose(1, 2)  # [R, Q * h, W]
    dots = dots.relu_().view(num_rows * num_queries, num_heads, -1)
    return (weights.reshape(-1, 1, num_heads) @ dots).view(num_rows, num_queries, -1)


def best_places(scores: torch.Tensor, seen: torch.Tensor, top_k: int) -> torch.Tensor:
    """scores: [R, Q, W], seen: [R, Q, W] bool -> [R, Q, W] bool, the ``top_k`` best of those seen."""
    if scores.shape[-1] <= top_k:
        return seen
    scores = scores.masked_fill(~seen, float("-inf"))
    last = scores.topk(top_k, dim=-1).values[..., -1:]  # [R, Q, 1]
    above, equal = scores > last, scores == last
    room = top_k - above.sum(dim=-1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=-1) <= room))) & seen
