"""The two loops over all weights that quantizing takes: in plain torch, and compiled for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs.blocks import WITHIN, over
from ..codecs.grids import IntegerGrid, Minifloat, ValueGrid

COMPILED_FROM = 1 << 18
"""Weights of a matrix from which the compiled loops pay for being loaded."""

Measure = Callable[[ValueGrid, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""From a grid, blocked float32 weights ``[1, ...]``, scales ``[candidates, block rows, block columns]``, grid
values of zero of the same shape and importance that broadcasts over the weights, both optional: the sums of
(weighted) squared errors of every block at every candidate, float32 of the shape of the scales."""

Encode = Callable[[ValueGrid, Tensor, Tensor, Tensor | None], Tensor]
"""From a grid, blocked float32 weights ``[1, ...]``, scales and grid values of zero (or None) ``[1, block
rows, block columns]``: the nearest codes, uint8, one to a byte, of the shape of the weights."""


@dataclass(frozen=True, slots=True)
class Loops:
    """One way to do both."""

    errors: Measure
    codes: Encode


def plain_errors(
    grid: ValueGrid, w: Tensor, factors: Tensor, shifts: Tensor | None, importance: Tensor | None
) -> Tensor:
    """As `Measure` says, candidate by candidate."""
    errors = torch.empty_like(factors)
    for i, factor in enumerate(factors):
        x = _in_grid(w, factor[None], None if shifts is None else shifts[i][None])
        missed = x.sub_(grid.round(x.clone())).mul_(over(factor[None])).square_()
        if importance is not None:
            missed.mul_(importance)
        errors[i] = missed.sum(WITHIN)[0]
    return errors


def plain_codes(grid: ValueGrid, w: Tensor, factors: Tensor, shifts: Tensor | None) -> Tensor:
    """As `Encode` says."""
    return grid.codes(_in_grid(w, factors, shifts))


def _in_grid(w: Tensor, factors: Tensor, shifts: Tensor | None) -> Tensor:
    x = w / over(factors)
    return x if shifts is None else x.add_(over(shifts))


def compiled_errors(
    grid: ValueGrid, w: Tensor, factors: Tensor, shifts: Tensor | None, importance: Tensor | None
) -> Tensor:
    """As `Measure` says, on CPU tensors, in the calling thread."""
    from . import _cpu_kernels

    errors = torch.empty_like(factors)
    columns = w.shape[3] * w.shape[4]
    weights = torch.ones(columns) if importance is None else importance.expand(1, 1, 1, *w.shape[3:])
    given = _arrays(w[0], factors, _zeros(shifts, factors), weights.reshape(-1))
    _cpu_kernels.block_errors(*given, *_rounding(grid), errors.numpy())
    return errors


def compiled_codes(grid: ValueGrid, w: Tensor, factors: Tensor, shifts: Tensor | None) -> Tensor:
    """As `Encode` says, on CPU tensors, in the calling thread."""
    from . import _cpu_kernels

    codes = torch.empty(w.shape, dtype=torch.uint8)
    rows = codes.view(w.shape[1] * w.shape[2], -1).numpy()
    given = _arrays(w[0], factors[0], _zeros(shifts, factors)[0])
    offset = grid.offset if isinstance(grid, IntegerGrid) else 0
    mantissa = grid.mantissa if isinstance(grid, Minifloat) else -1
    kind = np.int32(offset), np.int32(mantissa), np.int32(1 << (grid.bits - 1))
    _cpu_kernels.write_codes(*given, *_rounding(grid), *kind, rows)
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
    """The loops for matrices of so many `weights` on `device`."""
    if device.type != "cpu" or weights < COMPILED_FROM:
        return PLAIN
    try:
        from . import _cpu_kernels as _cpu_kernels
    except ImportError:  # numba has no release for every Python and every machine
        return PLAIN
    return COMPILED
