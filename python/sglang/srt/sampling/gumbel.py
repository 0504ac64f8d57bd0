"""Gumbel noise as a pure function of (request seed, index of the token chosen, token id).

Adding independent standard Gumbel noise to scores and taking the argmax draws from their softmax
(Gumbel 1954; Maddison, Tarlow, Minka, arXiv 1411.0030). Because the noise is a function and not a
stream, a verify row of a speculative step gets the noise that a plain step would have used there,
and the drafter gets the same noise at the same target ids (a Gumbel coupling: Daliri, Musco,
Suresh, arXiv 2408.07978).

The generator is a counter-based hash in wrapping 32-bit arithmetic, so every device gives the same
bits (a test holds them against plain Python integers). int32 rather than masked int64: on a CPU it
is four times faster, and the noise of a vocabulary is drawn for every verified row.
"""

from __future__ import annotations

import torch

_LOW32 = 0xFFFFFFFF
# Multipliers of low-bias xorshift-multiply hashes (C. Wellons, "hash-prospector").
_MUL_A = 0x21F0AAAD
_MUL_B = 0x735A2D97
_MUL_C = 0x31848BAB
_ROUND_KEYS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # digits of pi
_BLOCK_SIZE = 400_000  # values
_LARGEST_U = 1 - 2.0**-24  # largest float32 below 1


def noise(
    seed: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Standard Gumbel noise, finite for every input.

    seed: [N] int64; index: [N] int64, index in the sequence of the token being chosen;
    token_ids: [V] or [N, V] int64 or int32. Returns [N, V].

    With r uniform in [0, 2**32), ``u = (r + 0.5) / 2**32`` and the noise is ``-log(-log1p(-u))``. Its
    winners come from u near 0, where float32 holds all 32 bits of r: no grid is hit (a 24-bit u near
    1 would be infinite once in 16 million ids). The losers, u near 1, are cut at -2.8.
    """
    width = token_ids.shape[-1]
    block = max(1, _BLOCK_SIZE // width)  # rows
    if len(seed) <= block or seed.device.type != "cpu":
        return _noise(seed, index, token_ids, dtype)
    # Blocks stay in a CPU's cache: 1.5 times faster at 128 rows of 49,152, and no large temporaries.
    out = torch.empty(len(seed), width, dtype=dtype)
    for begin in range(0, len(seed), block):
        rows = slice(begin, begin + block)
        ids = token_ids if token_ids.dim() == 1 else token_ids[rows]
        out[rows] = _noise(seed[rows], index[rows], ids, dtype)
    return out


def _noise(
    seed: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    bits = random_bits(seed, index, token_ids)
    u = bits.to(torch.float32)
    u += (bits < 0) * 2.0**32  # int32 to the unsigned value
    u = u.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_U)
    return u.neg_().log1p_().neg_().log_().neg_().to(dtype)


def random_bits(seed: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 random bits for each id, as int32. Shapes as ``noise``."""
    left, right = _row_keys(seed, index)
    x = token_ids.to(torch.int32) ^ left[:, None]
    x ^= _shift(x, 16)
    x *= _MUL_A
    # A second key between the rounds: with one alone, two rows would hold the same values permuted.
    x ^= right[:, None]
    x ^= _shift(x, 15)
    x *= _MUL_B
    x ^= _shift(x, 15)
    x *= _MUL_C
    x ^= _shift(x, 16)
    return x


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int32."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)


def _row_keys(seed: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 keys a row: a four-round Feistel network over the seed, keyed by the index."""
    left, right = seed & _LOW32, (seed >> 32) & _LOW32
    counter = index & _LOW32
    for key in _ROUND_KEYS:
        left, right = right, left ^ _mix(((right + counter) & _LOW32) ^ key)
        counter = _mix(counter ^ key)
    return left.to(torch.int32), right.to(torch.int32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of [0, 2**32) with good avalanche; int64, no product overflows."""
    x = x ^ (x >> 16)
    x = (x * _MUL_A) & _LOW32
    x = x ^ (x >> 15)
    x = (x * _MUL_B) & _LOW32
    return x ^ (x >> 15)
