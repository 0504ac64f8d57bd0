"""Where NVFP4's products want the scales of blocks: tiles of 128 rows and 4 columns.

Of a tile's 512 bytes, rows ``r``, ``r + 32``, ``r + 64`` and ``r + 96`` lie side by side in 16, each with its
four columns. Tiles follow each other along the columns, then the rows; what is missing of the last is 0.
"""

from __future__ import annotations

from typing import Final

import torch

TILE_ROWS: Final = 128
TILE_COLUMNS: Final = 4
_QUARTER: Final = 32


def padded_size(rows: int, columns: int) -> tuple[int, int]:
    """In whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def in_tiles(scale: torch.Tensor) -> torch.Tensor:
    """[..., N, G] of one byte each -> the same in tiles, [..., padded N, padded G] uint8."""
    data = scale.view(torch.uint8)
    rows, columns = padded_size(*data.shape[-2:])
    missing = (0, columns - data.shape[-1], 0, rows - data.shape[-2])
    padded = torch.nn.functional.pad(data, missing)
    tiles = padded.unflatten(-1, (-1, TILE_COLUMNS)).unflatten(-3, (-1, TILE_ROWS // _QUARTER, _QUARTER))
    # [..., tile row, quarter, row of it, tile column, column of it]
    return tiles.transpose(-4, -2).reshape(padded.shape)
