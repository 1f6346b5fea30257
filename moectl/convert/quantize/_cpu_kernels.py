# mypy: ignore-errors
"""CPU kernels of quantization, compiled by numba; `error_loops` prepares and calls them."""

from __future__ import annotations

import numba
import numpy as np

ACCUMULATORS = 16
"""Partial sums per block, added up at the end: the order of additions does not depend on the machine."""


def _compiled(function):
    """`function` compiled, and cached on disk if a directory is writable."""
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")(function)
    except RuntimeError:  # no directory for the cache
        return numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)


@numba.njit(inline="always", error_model="numpy")
def _rounded(x, low, high, mask, least, magic):
    """`x` rounded to the grid with the constants of `grids.Rounding`."""
    q = np.float32(min(max(x, low), high))
    power = np.int32(q.view(np.int32) & mask)
    step = max(power.view(np.float32), least) * magic
    return (q + step) - step


@numba.njit(inline="always", error_model="numpy")
def _squared(weight, factor, shift, low, high, mask, least, magic):
    """The squared error of one weight at one scale."""
    x = weight / factor + shift
    error = (x - _rounded(x, low, high, mask, least, magic)) * factor
    return error * error


@_compiled
def block_errors(w, factors, shifts, importance, low, high, mask, least, magic, errors):
    """Fills `errors` with the weighted squared errors of every block; all arrays are float32.

    `w` is ``[rows, rows of a block, block columns, columns of a block]``; `factors`, `shifts` and `errors`
    are ``[candidates, rows, block columns]``; `importance` is ``[block columns x columns of a block]``.
    """
    sums = np.zeros(ACCUMULATORS, np.float32)
    columns = w.shape[3]
    whole = columns // ACCUMULATORS
    for row in range(w.shape[0]):
        for group in range(w.shape[2]):
            weights = importance[group * columns : (group + 1) * columns]
            for candidate in range(factors.shape[0]):
                factor = factors[candidate, row, group]
                shift = shifts[candidate, row, group]
                for j in range(ACCUMULATORS):
                    sums[j] = 0
                for inner in range(w.shape[1]):
                    line = w[row, inner, group]
                    for tile in range(whole):
                        for j in range(ACCUMULATORS):
                            # Unsigned: signed indices would be checked for being negative.
                            at = np.uint64(tile * ACCUMULATORS + j)
                            error = _squared(line[at], factor, shift, low, high, mask, least, magic)
                            sums[np.uint64(j)] += error * weights[at]
                    for at in range(whole * ACCUMULATORS, columns):
                        error = _squared(line[at], factor, shift, low, high, mask, least, magic)
                        sums[at - whole * ACCUMULATORS] += error * weights[at]
                total = np.float32(0)
                for j in range(ACCUMULATORS):
                    total += sums[j]
                errors[candidate, row, group] = total


@_compiled
def write_codes(w, factors, shifts, low, high, mask, least, magic, offset, mantissa, sign, codes):
    """Fills uint8 `codes` as `IntegerGrid.codes` or `Minifloat.codes` does.

    `w` is as in `block_errors`, `factors` and `shifts` are ``[rows, block columns]`` float32, `codes`
    ``[rows x rows of a block, block columns x columns of a block]``. `mantissa` is negative for integers,
    whose code of zero is `offset`; `sign` is the sign bit of small floats.
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
                        index = np.uint64(at)
                        x = line[index] / factor + shift
                        q = _rounded(x, low, high, mask, least, magic)
                        out[np.uint64(begin + at)] = np.uint8(np.int32(q) + offset)
                else:
                    for at in range(columns):
                        index = np.uint64(at)
                        x = np.float32(line[index] / factor)
                        size = np.float32(abs(_rounded(x, low, high, mask, least, magic)))
                        coded = (np.float32(size * up).view(np.int32) >> drop) - normal
                        coded = np.int32(size * fine) if size < least else coded
                        negative = np.int32(x.view(np.int32) < 0)
                        out[np.uint64(begin + at)] = np.uint8(coded | (negative * sign))
