"""The two inner loops of quantization over all weights: in plain torch, and compiled for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...lazy_torch import Tensor, np, torch
from ..codecs.blocks import WITHIN, over
from ..codecs.grids import IntegerGrid, Minifloat, ValueGrid

COMPILED_FROM = 1 << 18
"""Weights of a matrix from which loading the compiled loops pays off."""

Measure = Callable[[ValueGrid, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""From a grid, blocked float32 weights ``[1, ...]``, scales ``[candidates, block rows, block columns]``, grid
values of zero points of the same shape and importance that broadcasts over the weights, both optional: the
sums of (weighted) squared errors of every block for every candidate, float32 of the shape of the scales."""

Encode = Callable[[ValueGrid, Tensor, Tensor, Tensor | None], Tensor]
"""From a grid, blocked float32 weights ``[1, ...]``, scales and grid values of zero points (or None) ``[1,
block rows, block columns]``: the nearest codes, uint8, one per byte, of the shape of the weights."""


@dataclass(frozen=True, slots=True)
class Loops:
    """One implementation of both loops."""

    errors: Measure
    codes: Encode


def plain_errors(
    grid: ValueGrid, w: Tensor, factors: Tensor, shifts: Tensor | None, importance: Tensor | None
) -> Tensor:
    """`Measure` in torch, one candidate at a time."""
    errors = torch.empty_like(factors)
    for i, factor in enumerate(factors):
        x = _in_grid(w, factor[None], None if shifts is None else shifts[i][None])
        squared = x.sub_(grid.round(x.clone())).mul_(over(factor[None])).square_()
        if importance is not None:
            squared.mul_(importance)
        errors[i] = squared.sum(WITHIN)[0]
    return errors


def plain_codes(grid: ValueGrid, w: Tensor, factors: Tensor, shifts: Tensor | None) -> Tensor:
    """`Encode` in torch."""
    return grid.codes(_in_grid(w, factors, shifts))


def _in_grid(w: Tensor, factors: Tensor, shifts: Tensor | None) -> Tensor:
    x = w / over(factors)
    return x if shifts is None else x.add_(over(shifts))


def compiled_errors(
    grid: ValueGrid, w: Tensor, factors: Tensor, shifts: Tensor | None, importance: Tensor | None
) -> Tensor:
    """`Measure` on CPU tensors, compiled, in the calling thread."""
    from . import _cpu_kernels

    errors = torch.empty_like(factors)
    columns = w.shape[3] * w.shape[4]
    weights = torch.ones(columns) if importance is None else importance.expand(1, 1, 1, *w.shape[3:])
    arrays = _arrays(w[0], factors, _zeros(shifts, factors), weights.reshape(-1))
    _cpu_kernels.block_errors(*arrays, *_rounding(grid), errors.numpy())
    return errors


def compiled_codes(grid: ValueGrid, w: Tensor, factors: Tensor, shifts: Tensor | None) -> Tensor:
    """`Encode` on CPU tensors, compiled, in the calling thread."""
    from . import _cpu_kernels

    codes = torch.empty(w.shape, dtype=torch.uint8)
    rows = codes.view(w.shape[1] * w.shape[2], -1).numpy()
    arrays = _arrays(w[0], factors[0], _zeros(shifts, factors)[0])
    offset = grid.offset if isinstance(grid, IntegerGrid) else 0
    mantissa = grid.mantissa if isinstance(grid, Minifloat) else -1
    encoding = np.int32(offset), np.int32(mantissa), np.int32(1 << (grid.bits - 1))
    _cpu_kernels.write_codes(*arrays, *_rounding(grid), *encoding, rows)
    return codes


def _zeros(shifts: Tensor | None, factors: Tensor) -> Tensor:
    return torch.zeros_like(factors) if shifts is None else shifts


def _arrays(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(t.contiguous().numpy() for t in tensors)


def _rounding(grid: ValueGrid) -> tuple[Any, ...]:
    low, high, mask, least, magic = grid.rounding
    return np.float32(low), np.float32(high), np.int32(mask), np.float32(least), np.float32(magic)


PLAIN = Loops(plain_errors, plain_codes)
COMPILED = Loops(compiled_errors, compiled_codes)


def loops_for(device: torch.device, weights: int) -> Loops:
    """The loops for matrices of `weights` elements on `device`."""
    if device.type != "cpu" or weights < COMPILED_FROM:
        return PLAIN
    try:
        from . import _cpu_kernels as _cpu_kernels
    except ImportError:  # numba does not support every Python version and machine
        return PLAIN
    return COMPILED
