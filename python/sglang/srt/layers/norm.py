"""Root mean square norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """``x / rms(x) * weight`` over the last dimensions, which are those of ``weight``'s last one.

    Statistics are float32 (float64 in a float64 model); the normed value is rounded to the input's
    dtype before it is multiplied by the weight, as in transformers. ``weight`` may have leading
    dimensions that broadcast: [heads, d] norms each head with its own weight.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight  # [..., size]
        self.eps = eps
        self.size = weight.shape[-1]
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size], same shape back."""
        if x.dtype in (torch.float32, torch.float64):
            if self.weight.dim() == 1:
                return F.rms_norm(x, (self.size,), self.weight, self.eps)
            return F.rms_norm(x, (self.size,), None, self.eps) * self.weight
        if x.is_cuda and x.dim() == 2 and self.weight.dim() == 1:
            from sgl_kernel.norm.ops import rms_norm  # a CPU server needs nothing of sgl_kernel

            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x.float(), (self.size,), None, self.eps).to(x.dtype) * self.weight
