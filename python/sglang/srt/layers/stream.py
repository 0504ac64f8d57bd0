"""The residual stream between two blocks of a layer, with its norm where that has been made already.

Every block begins with a norm of the stream. Small products make it on their way, over one GPU and over
several; experts, packed matrices and the library's products launch it by themselves. Over several GPUs the
block before ends in a sum over the ranks, and that can norm its result in the same launch: so a block is
told which norm the next one would launch (``then``, None if it would not launch one), and gives it along if
its sum has made it. Whoever reads the stream asks ``input_of`` with its own norm, and gets what there is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Stream:
    """Used up by the block that adds itself to it: that may change ``x`` in place."""

    x: torch.Tensor  # [T, H]
    normed: torch.Tensor | None = None  # [T, H]: ``by(x)``
    by: RMSNorm | None = None

    def input_of(self, norm: RMSNorm) -> tuple[torch.Tensor, RMSNorm | None]:
        """What the block with this norm reads, and the norm that is yet to be made of it."""
        if self.normed is not None and self.by is norm:
            return self.normed, None
        return self.x, norm

    def under(self, norm: RMSNorm) -> torch.Tensor:
        """[T, H]: ``norm(x)``."""
        x, still = self.input_of(norm)
        return x if still is None else still(x)
