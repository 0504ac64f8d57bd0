"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Embedding:
    """``ids [...] int64 -> [..., size]``. The matrix stays a plain one: a lookup needs whole rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # [vocab, size]
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)
