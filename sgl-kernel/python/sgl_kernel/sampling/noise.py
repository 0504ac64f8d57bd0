"""Gumbel noise as a function of (seed, index of the token chosen, token id).

The plain version repeats the definition of ``srt/sampling/gumbel.py`` (which says why it is so): this
package imports nothing of sglang, and a test holds the two together.
"""

from __future__ import annotations

import torch

from sgl_kernel._dispatch import use_kernel
from sgl_kernel.launch import Launch

_LOW32 = 0xFFFFFFFF
_MUL_A, _MUL_B, _MUL_C = 0x21F0AAAD, 0x735A2D97, 0x31848BAB
_ROUND_KEYS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
_LARGEST_U = 1 - 2.0**-24


def gumbel_noise(
    seed: torch.Tensor, index: torch.Tensor, vocab_size: int, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, V] float32. seed, index: [N] int64; token_ids: [V] integer, None for 0 … V-1."""
    out = torch.empty(seed.shape[0], vocab_size, dtype=torch.float32, device=seed.device)
    if use_kernel(seed):
        noise_launch(seed, index, token_ids, out).run()
        return out
    return out.copy_(noise_of_bits(random_bits_ref(seed, index, _ids(vocab_size, token_ids, seed.device))))


def random_bits(
    seed: torch.Tensor, index: torch.Tensor, vocab_size: int, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, V] int32, the bits that the noise is made of; the same on every device."""
    if use_kernel(seed):
        out = torch.empty(seed.shape[0], vocab_size, dtype=torch.int32, device=seed.device)
        noise_launch(seed, index, token_ids, out).run()
        return out
    return random_bits_ref(seed, index, _ids(vocab_size, token_ids, seed.device))


def noise_launch(
    seed: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    from sgl_kernel.sampling.kernels import noise_kernel

    num_rows, vocab_size = out.shape
    block = 1024
    return Launch(
        noise_kernel,
        (-(-vocab_size // block), num_rows),
        (seed, index, seed if token_ids is None else token_ids, out, vocab_size),
        {"HAS_IDS": token_ids is not None, "BITS": out.dtype == torch.int32, "BLOCK": block},
        fp_fusion=False,
    )


def noise_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """``-log(-log1p(-u))`` with ``u = (bits + 0.5) / 2**32``."""
    u = bits.to(torch.float32) + (bits < 0) * 2.0**32
    u = u.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_U)
    return u.neg_().log1p_().neg_().log_().neg_()


def random_bits_ref(seed: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """seed, index: [N] int64; token_ids: [V] integer -> [N, V] int32."""
    left, right = _row_keys(seed, index)
    x = token_ids.to(torch.int32) ^ left[:, None]
    x = (x ^ _shift(x, 16)) * _MUL_A
    x = x ^ right[:, None]
    x = (x ^ _shift(x, 15)) * _MUL_B
    x = (x ^ _shift(x, 15)) * _MUL_C
    return x ^ _shift(x, 16)


def _ids(vocab_size: int, token_ids: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    return torch.arange(vocab_size, device=device) if token_ids is None else token_ids


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int32."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)


def _row_keys(seed: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = seed & _LOW32, (seed >> 32) & _LOW32
    counter = index & _LOW32
    for key in _ROUND_KEYS:
        left, right = right, left ^ _mix(((right + counter) & _LOW32) ^ key)
        counter = _mix(counter ^ key)
    return left.to(torch.int32), right.to(torch.int32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * _MUL_A) & _LOW32
    x = x ^ (x >> 15)
    x = (x * _MUL_B) & _LOW32
    return x ^ (x >> 15)
