"""The inverse of the tiles in which kernels take the scales of quantized tokens."""

from __future__ import annotations

import math

from torch import Tensor

from moectl.kernels.quantize_tokens import TILE_COLUMNS, TILE_ROWS


def from_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """``[..., rows, columns]`` scales: the inverse of `in_tiles`."""
    *lead, down, across = tiles.shape
    blocks = tiles.reshape(math.prod(lead), down // TILE_ROWS, across // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    padded = blocks.permute(0, 1, 4, 3, 2, 5).reshape(*lead, down, across)
    return padded[..., :rows, :columns].contiguous()
