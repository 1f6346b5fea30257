"""Search for the scale with the least squared error of every block, near the usual scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...lazy_torch import Tensor, torch
from ..codecs.blocks import WITHIN
from ..codecs.grids import E4M3, IntegerGrid, Minifloat, ValueGrid
from ..codecs.scaled import Scaled
from ..codecs.scales import E8M0, E4M3Scale, FloatScale, ScaleStore
from .error_loops import Measure, plain_errors

Rounds = tuple[tuple[float, ...], ...]

STEPS: Mapping[tuple[type[ScaleStore], type[ValueGrid]], Rounds] = {
    (E8M0, Minifloat): ((-1, 1),),
    (E4M3Scale, Minifloat): ((-3, -2, -1, 1, 2, 3, 4, 5, 6, 7),),
    (FloatScale, Minifloat): ((0.9, 1.1, 1.2, 1.35, 1.5, 1.65, 1.8),),
    (FloatScale, IntegerGrid): (
        (0.4, 0.5, 0.6, 0.68, 0.76, 0.83, 0.88, 0.91, 0.94, 0.97, 1.03, 1.07),
        (0.96, 0.98, 0.99, 1.01, 1.02, 1.04),
        (0.996, 1.004),
    ),
}
"""Steps from the best scale so far in each round, by the storage of scales and the grid of codes.

For bytes, offsets in codes: doubling a scale only loses the finest values of E2M1, so at most one octave up
is tried; clipping below 0.7 of the largest weight was never the best for Gaussian or heavy-tailed blocks of
16 or 32. For floats, factors: integers gain more from clipping the longer the block is; for E4M3 only the
mantissa of the scale matters.
"""

HEADROOM = 2.0
"""Factor on a searched global scale that leaves room for block scales above the usual ones: a power of two,
so that the usual scales can still be stored."""


def search(
    codec: Scaled,
    w: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    importance: Tensor | None = None,
    measure: Measure = plain_errors,
) -> tuple[Tensor, Tensor | None]:
    """Stored scales (and zeros) whose squared error is at most that of the given ones in every block of `w`.

    `w` is blocked float32 ``[1, ...]``, global scale divided out; `importance` broadcasts over it.
    """
    best, error = ScaleChoice(scale, zero), torch.full(scale.shape, torch.inf, device=w.device)
    first, middle = [best], None
    if zero is not None:
        low, high = w.amin(WITHIN), w.amax(WITHIN)
        middle = (low.clamp(max=0) + high.clamp(min=0)) / 2
        symmetric = codec.store.covering(torch.maximum(high, -low), codec.grid)
        first.append(ScaleChoice(symmetric, torch.full_like(zero, 1 << (codec.grid.bits - 1))))
    for i, steps in enumerate(STEPS[type(codec.store), type(codec.grid)]):
        near = [codec.store.near(best.scale, step) for step in steps]
        choices = [ScaleChoice(s, None if middle is None else _centred(codec, s, middle)) for s in near]
        best, error = _best(codec, w, ([] if i else first) + choices, importance, measure, best, error)
    return best


class ScaleChoice(NamedTuple):
    """Stored scales ``[1, block rows, block columns]`` and zeros, or None."""

    scale: Tensor
    zero: Tensor | None


def _best(
    codec: Scaled,
    w: Tensor,
    choices: list[ScaleChoice],
    importance: Tensor | None,
    measure: Measure,
    best: ScaleChoice,
    least: Tensor,
) -> tuple[ScaleChoice, Tensor]:
    """For every block the first of the best choices, including `best` with errors `least`, and its error."""
    zeros = [choice.zero for choice in choices if choice.zero is not None]
    factors = codec.store.load(torch.cat([choice.scale for choice in choices]))
    errors = measure(codec.grid, w, factors, codec.shift(torch.cat(zeros)) if zeros else None, importance)
    for choice, error in zip(choices, errors, strict=True):
        better = error < least
        least = torch.where(better, error, least)
        zero = None
        if choice.zero is not None and best.zero is not None:
            zero = torch.where(better, choice.zero, best.zero)
        best = ScaleChoice(torch.where(better, choice.scale, best.scale), zero)
    return best, least


def _centred(codec: Scaled, scale: Tensor, middle: Tensor) -> Tensor:
    """Zero points that map the middle of a block's range to the middle of the codes."""
    last = (1 << codec.grid.bits) - 1
    return (last / 2 - middle / codec.store.load(scale)).round_().clamp_(0, last).to(torch.uint8)


def with_headroom(codec: Scaled, usual: Tensor, largest: Tensor) -> Tensor:
    """The global scales ``[e, 1, 1]`` to search under: the `usual` ones times `HEADROOM`.

    They are unchanged if a block of weights (`largest` magnitudes ``[e, ...]``) would then need a scale below
    E4M3's normal numbers and lose precision.
    """
    smallest = torch.where(largest > 0, largest, torch.inf).flatten(1).amin(1)[:, None, None]
    fits = smallest / (codec.grid.largest * HEADROOM * usual) >= 2.0 * 2.0**E4M3.exponent
    return torch.where(fits, usual * HEADROOM, usual)
