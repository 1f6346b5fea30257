# mypy: ignore-errors
"""Squared errors of blocks at many scales on CPUs, compiled by numba; `measure` prepares and calls them."""

from __future__ import annotations

import numba
import numpy as np

LANES = 16
"""Sums run over so many lanes, then over the lanes: the order does not depend on the machine."""


def _compiled(function):
    """`function` compiled, kept on disk where a folder can be written."""
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")(function)
    except RuntimeError:  # no folder for the cache
        return numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)


@numba.njit(inline="always", error_model="numpy")
def _squared(weight, factor, shift, low, high, mask, least, magic):
    """The squared error of one weight at one scale: `measure.Rounding` says how it is rounded."""
    x = weight / factor + shift
    q = np.float32(min(max(x, low), high))
    power = np.int32(q.view(np.int32) & mask)
    step = max(power.view(np.float32), least) * magic
    missed = (x - ((q + step) - step)) * factor
    return missed * missed


@_compiled
def block_errors(w, factors, shifts, importance, first, last, low, high, mask, least, magic, errors):
    """Fills `errors` of rows `first` to `last`, all float32.

    `w` is ``[rows, rows of a block, block columns, columns of a block]``; `factors`, `shifts` and `errors`
    are ``[candidates, rows, block columns]``; `importance` is ``[block columns x columns of a block]``.
    """
    lanes = np.zeros(LANES, np.float32)
    columns = w.shape[3]
    whole = columns // LANES
    for row in range(first, last):
        for group in range(w.shape[2]):
            weights = importance[group * columns : (group + 1) * columns]
            for candidate in range(factors.shape[0]):
                factor = factors[candidate, row, group]
                shift = shifts[candidate, row, group]
                for j in range(LANES):
                    lanes[j] = 0
                for inner in range(w.shape[1]):
                    line = w[row, inner, group]
                    for tile in range(whole):
                        for j in range(LANES):
                            # Unsigned places: a sign would have to be looked at, weight by weight.
                            at = np.uint64(tile * LANES + j)
                            error = _squared(line[at], factor, shift, low, high, mask, least, magic)
                            lanes[np.uint64(j)] += error * weights[at]
                    for at in range(whole * LANES, columns):
                        error = _squared(line[at], factor, shift, low, high, mask, least, magic)
                        lanes[at - whole * LANES] += error * weights[at]
                total = np.float32(0)
                for j in range(LANES):
                    total += lanes[j]
                errors[candidate, row, group] = total
