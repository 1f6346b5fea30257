"""The scale of least squared error for every block, among scales near the usual one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..codecs.blocks import WITHIN, over
from ..codecs.grids import E4M3, Grid, Integers, Minifloat
from ..codecs.scaled import Scaled
from ..codecs.scales import E8M0, E4M3Scale, FloatScale, ScaleStore

Rounds = tuple[tuple[float, ...], ...]

STEPS: Mapping[tuple[type[ScaleStore], type[Grid]], Rounds] = {
    (E8M0, Minifloat): ((-1, 1),),
    (E4M3Scale, Minifloat): ((-3, -2, -1, 1, 2, 3, 4, 5, 6, 7),),
    (FloatScale, Minifloat): ((0.9, 1.1, 1.2, 1.35, 1.5, 1.65, 1.8),),
    (FloatScale, Integers): (
        (0.4, 0.5, 0.6, 0.68, 0.76, 0.83, 0.88, 0.91, 0.94, 0.97, 1.03, 1.07),
        (0.96, 0.98, 0.99, 1.01, 1.02, 1.04),
        (0.996, 1.004),
    ),
}
"""Steps from the best scale so far, round by round, by how scales are stored and what codes stand for.

Bytes: to the next larger or smaller scale. A scale twice as large only loses the finest values of E2M1, so
no more than one octave up is tried; clipping below 0.7 of the largest weight never was the best for
Gaussian or heavy-tailed blocks of 16 or 32. Floats: factors; integers gain from clipping the more, the
longer the block; the phase of the scale is all that matters to E4M3.
"""

HEADROOM = 2.0
"""What a searched global scale leaves for block scales above the usual ones: a power of two, so that the
usual scales remain among those that can be stored."""


class Choice:
    """The best scales so far of a blocked tensor `w`, and the squared error of every block.

    Attributes:
        scale: stored scales ``[e, block rows, block columns]``.
        zero: uint8 codes of zero, or None.
        error: float32 squared errors, weighted by `importance` where there is one.
    """

    def __init__(
        self, codec: Scaled, w: Tensor, scale: Tensor, zero: Tensor | None, importance: Tensor | None
    ) -> None:
        self._codec, self._w, self._importance = codec, w, importance
        self.scale, self.zero = scale, zero
        self.error = self._error(scale, zero)

    def offer(self, scale: Tensor, zero: Tensor | None) -> None:
        """Takes over the blocks in which these scales (and zeros) are better."""
        error = self._error(scale, zero)
        better = error < self.error
        self.scale = torch.where(better, scale, self.scale)
        self.error = torch.where(better, error, self.error)
        if zero is not None and self.zero is not None:
            self.zero = torch.where(better, zero, self.zero)

    def _error(self, scale: Tensor, zero: Tensor | None) -> Tensor:
        shift = None if zero is None else self._codec.shift(zero)
        return block_errors(self._codec.grid, self._w, self._codec.store.load(scale), shift, self._importance)


def block_errors(
    grid: Grid, w: Tensor, factor: Tensor, shift: Tensor | None, importance: Tensor | None
) -> Tensor:
    """Sums of squared errors ``[e, block rows, block columns]`` of blocked float32 `w` at float32 scales.

    `shift` is the grid value of zero; `importance` broadcasts over `w` and weights its squared errors.
    """
    x = w / over(factor)
    if shift is not None:
        x.add_(over(shift))
    missed = x.sub_(grid.round(x.clone())).mul_(over(factor)).square_()
    if importance is not None:
        missed.mul_(importance)
    return missed.sum(WITHIN)


def search(
    codec: Scaled, w: Tensor, scale: Tensor, zero: Tensor | None = None, importance: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Stored scales (and zeros) of no larger squared error in any block of `w` than those given.

    `w` is blocked float32, global scale divided out; `importance` broadcasts over it.
    """
    choice = Choice(codec, w, scale, zero, importance)
    middle = (w.amin(WITHIN).clamp_(max=0) + w.amax(WITHIN).clamp_(min=0)) / 2 if zero is not None else None
    if zero is not None:
        largest = torch.maximum(w.amax(WITHIN), -w.amin(WITHIN))
        symmetric = codec.store.covering(largest, codec.grid)
        choice.offer(symmetric, torch.full_like(zero, 1 << (codec.grid.bits - 1)))
    for steps in STEPS[type(codec.store), type(codec.grid)]:
        best = choice.scale
        for step in steps:
            near = codec.store.near(best, step)
            choice.offer(near, None if middle is None else _centred(codec, near, middle))
    return choice.scale, choice.zero


def _centred(codec: Scaled, scale: Tensor, middle: Tensor) -> Tensor:
    """Codes of zero that put the middle of a block's range on the middle of the codes."""
    last = (1 << codec.grid.bits) - 1
    return (last / 2 - middle / codec.store.load(scale)).round_().clamp_(0, last).to(torch.uint8)


def roomy(codec: Scaled, usual: Tensor, largest: Tensor) -> Tensor:
    """The global scales ``[e, 1, 1]`` to search under: the `usual` ones times `HEADROOM`.

    They stay as they are where a block of weights (`largest` magnitudes ``[e, ...]``) would then need a
    scale below E4M3's normal numbers and lose precision.
    """
    smallest = torch.where(largest > 0, largest, torch.inf).flatten(1).amin(1)[:, None, None]
    fits = smallest / (codec.grid.largest * HEADROOM * usual) >= 2.0 * 2.0**E4M3.exponent
    return torch.where(fits, usual * HEADROOM, usual)
