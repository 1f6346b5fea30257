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
def _rounded(x, low, high, mask, least, magic):
    """`x` on the grid: `grids.Rounding` says how."""
    q = np.float32(min(max(x, low), high))
    power = np.int32(q.view(np.int32) & mask)
    step = max(power.view(np.float32), least) * magic
    return (q + step) - step


@numba.njit(inline="always", error_model="numpy")
def _squared(weight, factor, shift, low, high, mask, least, magic):
    """The squared error of one weight at one scale."""
    x = weight / factor + shift
    missed = (x - _rounded(x, low, high, mask, least, magic)) * factor
    return missed * missed


@_compiled
def block_errors(w, factors, shifts, importance, low, high, mask, least, magic, errors):
    """Fills `errors`, all float32.

    `w` is ``[rows, rows of a block, block columns, columns of a block]``; `factors`, `shifts` and `errors`
    are ``[candidates, rows, block columns]``; `importance` is ``[block columns x columns of a block]``.
    """
    lanes = np.zeros(LANES, np.float32)
    columns = w.shape[3]
    whole = columns // LANES
    for row in range(w.shape[0]):
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


@_compiled
def write_codes(w, factors, shifts, low, high, mask, least, magic, offset, mantissa, sign, codes):
    """Fills uint8 `codes`: `Integers.codes` or `Minifloat.codes`.

    `w` is as above, `factors` and `shifts` are ``[rows, block columns]`` float32, `codes`
    ``[rows x rows of a block, block columns x columns of a block]``. `mantissa` is negative for integers,
    whose code of zero is `offset`; `sign` is the sign's bit of small floats.
    """
    columns = w.shape[3]
    drop = np.int32(23 - mantissa)
    normal = np.int32((127 << max(mantissa, 0)) - (1 << max(mantissa, 0)))
    up = np.float32(1) / least
    fine = up * np.float32(1 << max(mantissa, 0))
    for row in range(w.shape[0]):
        for inner in range(w.shape[1]):
            out = codes[row * w.shape[1] + inner]
            for group in range(w.shape[2]):
                factor, shift = factors[row, group], shifts[row, group]
                line = w[row, inner, group]
                begin = group * columns
                if mantissa < 0:
                    for at in range(columns):
                        place = np.uint64(at)
                        x = line[place] / factor + shift
                        q = _rounded(x, low, high, mask, least, magic)
                        out[np.uint64(begin + at)] = np.uint8(np.int32(q) + offset)
                else:
                    for at in range(columns):
                        place = np.uint64(at)
                        x = np.float32(line[place] / factor)
                        size = np.float32(abs(_rounded(x, low, high, mask, least, magic)))
                        coded = (np.float32(size * up).view(np.int32) >> drop) - normal
                        coded = np.int32(size * fine) if size < least else coded
                        negative = np.int32(x.view(np.int32) < 0)
                        out[np.uint64(begin + at)] = np.uint8(coded | (negative * sign))
