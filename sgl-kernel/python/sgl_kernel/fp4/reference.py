"""NVFP4 activations in plain PyTorch, and products with both sides in 4 bits: what kernels are compared with.

A value is ``e2m1 * block scale / global scale``: blocks are 16 values of a row, their scales e4m3. The global
scale is one number of a checkpoint, (6 * 448) / the largest activation that was seen when it was made; what
is larger is cut off. Order and type (float32) of each step are those of FlashInfer's source without its
approximate reciprocals (``FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from sgl_kernel.moe.weights import E2M1

BLOCK: Final = 16
LARGEST_SCALE: Final = 448.0  # of e4m3
_LARGEST: Final = torch.finfo(torch.float32).max


def _ends() -> tuple[float, ...]:
    """Between two neighbouring values; a tie goes to the even code, so where that is the upper one the
    end lies just below the middle."""
    middles = [(low + high) / 2 for low, high in zip(E2M1[:-1], E2M1[1:], strict=True)]
    below = torch.nextafter(torch.tensor(middles), torch.zeros(len(middles))).tolist()
    return tuple(below[code] if code % 2 else middle for code, middle in enumerate(middles))


_ENDS: Final = _ends()


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows in NVFP4, without their global scale."""

    codes: torch.Tensor  # [T, K / 2] uint8, the even column in the low half
    scale: torch.Tensor  # [T, K / 16] float8_e4m3fn

    def values(self) -> torch.Tensor:
        """[T, K] float32, exact: ``e2m1 * scale``."""
        of_codes = torch.tensor((*E2M1, *(-v for v in E2M1)), device=self.codes.device)
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)
        return of_codes[codes.int()] * self.scale.float().repeat_interleave(BLOCK, dim=-1)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 from 0 to 15: the nearest value, a tie to the even code, at most 6."""
    code = torch.bucketize(x.abs(), torch.tensor(_ENDS, device=x.device))
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def quantise(x: torch.Tensor, global_scale: torch.Tensor) -> Quantised:
    """x: [T, K], finite; global_scale: one float32 number."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))  # [T, K / 16, 16]
    most = blocks.abs().amax(-1)
    by = global_scale.float().reshape(())
    sixth = torch.tensor(1.0 / 6.0, device=x.device)  # rounded to float32, as the kernel has it
    scale = (most * (by * sixth)).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    times = (1.0 / (scale.float() * (1.0 / by))).clamp(max=_LARGEST)
    times = torch.where(most > 0, times, torch.zeros_like(times))
    codes = e2m1_codes(blocks * times[..., None]).flatten(-2)
    return Quantised(codes[..., 0::2] | (codes[..., 1::2] << 4), scale)


def fake_quantise(x: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """[T, K] float32: what stands for x after it has been quantised."""
    return quantise(x, global_scale).values() / global_scale.float()


def product(x: Quantised, weight: Quantised, alpha: torch.Tensor) -> torch.Tensor:
    """``alpha * x @ weight^T`` [T, N] float32, ``alpha`` the two global scales' reciprocals multiplied."""
    return (x.values() @ weight.values().t()) * alpha.float()
