"""Views of matrices as blocks that share a scale; whole blocks are viewed without a copy."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import CheckpointError
from ...lazy_torch import Tensor, torch
from ...problem.schemes import FULL, WeightFormat

WITHIN = (2, 4)
"""Axes of a blocked tensor within one block."""


@dataclass(frozen=True, slots=True)
class ScaleBlocks:
    """Sizes of a matrix and of its blocks.

    A blocked tensor is ``[e, block rows, rows of a block, block columns, columns of a block]``; the scale
    of a block is ``[e, block rows, block columns]``.
    """

    n: int
    k: int
    rows: int
    columns: int

    @property
    def scales(self) -> tuple[int, int]:
        """Number of block rows and block columns."""
        return -(-self.n // self.rows), -(-self.k // self.columns)

    def split(self, t: Tensor) -> Tensor:
        """`t` ``[e, n, k]`` as blocks; a copy padded with zeros if the last blocks are not whole."""
        down, across = self.scales
        n, k = down * self.rows, across * self.columns
        if (n, k) != (self.n, self.k):
            t = torch.nn.functional.pad(t, (0, k - self.k, 0, n - self.n))
        return t.reshape(t.shape[0], down, self.rows, across, self.columns)

    def join(self, t: Tensor) -> Tensor:
        """``[e, n, k]`` from blocks, the inverse of `split`."""
        whole = t.reshape(t.shape[0], t.shape[1] * self.rows, t.shape[3] * self.columns)
        return whole[:, : self.n, : self.k].contiguous()


def over(scale: Tensor) -> Tensor:
    """`scale` ``[e, block rows, block columns]`` shaped to broadcast over a blocked tensor."""
    return scale[:, :, None, :, None]


def blocks_of(weight: WeightFormat, n: int, k: int, scale_rows: int | None = None) -> ScaleBlocks:
    """The blocks of a matrix ``[n, k]`` of `weight`.

    `scale_rows` is the number of scales stored by a format with one scale for all rows: one, or one for each
    half of fused rows. CheckpointError when groups along a row, or the rows of the halves, are not whole.
    """
    down, across = weight.block
    columns = k if across == FULL else across
    if k == 0 or n == 0 or (down in (1, FULL) and k % columns) or k * weight.bits % 8:
        raise CheckpointError(f"{weight} needs rows of whole groups and bytes, got {n} rows of {k} weights.")
    if down != FULL:
        return ScaleBlocks(n, k, down, columns)
    parts = scale_rows or 1
    if n % parts:
        raise CheckpointError(f"{n} rows of {weight} do not make {parts} equal parts, one for each scale.")
    return ScaleBlocks(n, k, n // parts, columns)
