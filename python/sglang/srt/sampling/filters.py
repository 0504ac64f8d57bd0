"""Top-k, top-p and min-p, applied jointly as SGLang does: all three look at the same softmax."""

from __future__ import annotations

import torch


def filter_scores(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Scores with the excluded ids at -inf. The best id always stays.

    scores: [R, N, V], logits divided by the temperature; top_k: [R] int64 (V or more: all);
    top_p, min_p: [R] float. An id stays if it ranks within top_k (equal scores: lower id first), the
    ids before it hold at most top_p, and it has at least min_p of the best id's probability.
    Every row is computed from that row alone.
    """
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1).roll(1, dims=-1)
    before[..., 0] = 0
    rank = torch.arange(scores.shape[-1], device=scores.device)
    # A limit of 1 must keep all ids, also where rounding makes their sum exceed 1.
    limit = torch.where(top_p >= 1, torch.inf, top_p.to(probs.dtype))[:, None, None]
    drop = before > limit
    drop |= rank >= top_k[:, None, None]
    drop |= probs < min_p.to(probs.dtype)[:, None, None] * probs[..., :1]
    drop[..., 0] = False
    dropped = torch.empty_like(drop).scatter_(-1, ids, drop)
    return scores.masked_fill(dropped, -torch.inf)
