"""Squared errors of blocks at many scales: in plain torch, and compiled for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..codecs.blocks import WITHIN, over
from ..codecs.grids import Grid
from ..cpu_pass import thread_count

COMPILED_FROM = 1 << 18
"""Weights of a matrix from which the compiled loops pay for being loaded."""

Measure = Callable[[Grid, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""From a grid, blocked float32 weights ``[1, ...]``, scales ``[candidates, block rows, block columns]``, grid
values of zero of the same shape and importance that broadcasts over the weights, both optional: the sums of
(weighted) squared errors of every block at every candidate, float32 of the shape of the scales."""


def plain(grid: Grid, w: Tensor, factors: Tensor, shifts: Tensor | None, importance: Tensor | None) -> Tensor:
    """As `Measure` says, candidate by candidate."""
    errors = torch.empty_like(factors)
    for i, factor in enumerate(factors):
        x = w / over(factor[None])
        if shifts is not None:
            x.add_(over(shifts[i][None]))
        missed = x.sub_(grid.round(x.clone())).mul_(over(factor[None])).square_()
        if importance is not None:
            missed.mul_(importance)
        errors[i] = missed.sum(WITHIN)[0]
    return errors


def compiled(
    grid: Grid, w: Tensor, factors: Tensor, shifts: Tensor | None, importance: Tensor | None
) -> Tensor:
    """As `Measure` says, on CPU tensors, on as many threads as conversions have."""
    from . import _cpu_kernels

    errors = torch.empty_like(factors)
    shifts = torch.zeros(()).expand_as(factors) if shifts is None else shifts
    columns = w.shape[3] * w.shape[4]
    weights = torch.ones(columns) if importance is None else importance.expand(1, 1, 1, *w.shape[3:])
    low, high, mask, least, magic = grid.rounding
    rounding = np.float32(low), np.float32(high), np.int32(mask), np.float32(least), np.float32(magic)
    arrays = [t.contiguous().numpy() for t in (w[0], factors, shifts, weights.reshape(-1))]
    rows = factors.shape[1]
    parts = min(thread_count(), rows)
    ends = [rows * i // parts for i in range(parts + 1)]
    calls = [(*arrays, first, last, *rounding, errors.numpy()) for first, last in pairwise(ends)]
    if parts == 1:
        _cpu_kernels.block_errors(*calls[0])
        return errors
    for done in [_pool(parts).submit(_cpu_kernels.block_errors, *call) for call in calls]:
        done.result()
    return errors


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="quantize")


def measure_for(device: torch.device, weights: int) -> Measure:
    """What measures matrices of so many `weights` on `device`."""
    if device.type != "cpu" or weights < COMPILED_FROM:
        return plain
    try:
        from . import _cpu_kernels as _cpu_kernels
    except ImportError:  # numba has no release for every Python and every machine
        return plain
    return compiled
