"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.distributed.shares import Span
from sglang.srt.distributed.tensor_parallel import Join


class Embedding:
    """``ids [...] int64 -> [..., size]``. The matrix stays a plain one: a lookup needs whole rows.

    Split over ranks, each looks up the ids it has, and the sum of all is exact: all but one are zeros.
    """

    def __init__(self, weight: torch.Tensor, ids: Span | None = None, summing: Join | None = None) -> None:
        """``ids``: those of the first rows; further rows are padding. None: all there are."""
        self.weight = weight  # [vocab, size], or this rank's part of it
        self.weight_bytes = weight.numel() * weight.element_size()
        self._ids = ids
        self._summing = summing

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._summing is None or self._ids is None:
            return F.embedding(ids, self.weight)
        elsewhere = (ids < self._ids.begin) | (ids >= self._ids.end)
        own = (ids - self._ids.begin).masked_fill_(elsewhere, 0)
        return self._summing(F.embedding(own, self.weight).masked_fill_(elsewhere[..., None], 0))
