"""Small integers in 32-bit words, the first one in the lowest bits."""

from __future__ import annotations

from typing import Final

import torch

WORD_BITS: Final = 32


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """words: [..., W] int32 -> [..., count] uint8, ``32 / bits`` of them a word (4 or 8 bits each).

    On a little-endian machine the bytes of a word are in the same order, so nothing is shifted but
    the two halves of a byte.
    """
    # Flat first: a last dimension of 1 may have any stride, which a view as bytes does not take.
    values = words.reshape(-1).contiguous().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 4:
        values = torch.stack((values & 0xF, values >> 4), dim=-1).flatten(-2)
    return values[..., :count]


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """values: [..., count] uint8, each below ``2 ** bits`` -> [..., ceil(count * bits / 32)] int32."""
    a_word = WORD_BITS // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % a_word))
    if bits == 4:
        values = values[..., 0::2] | (values[..., 1::2] << 4)
    return values.contiguous().view(torch.int32)


def words_of(count: int, bits: int) -> int:
    """Words that ``count`` values take."""
    return -(-count * bits // WORD_BITS)
