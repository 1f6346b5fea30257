"""What quantizing kernels do instead of dividing: a product with the reciprocal, and one correction."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np
import pytest
from numba import njit, prange

FMA = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
FMA.argtypes, FMA.restype = [ctypes.c_float] * 3, ctypes.c_float


@njit(parallel=True)
def wrong(numbers: np.ndarray, scales: np.ndarray) -> int:
    """How many quotients are not those that the division rounds to."""
    count = 0
    for i in prange(len(scales)):
        scale = scales[i]
        reciprocal = np.float32(1) / scale
        for x in numbers:
            quotient = x * reciprocal
            corrected = FMA(-reciprocal, FMA(scale, quotient, -x), quotient)
            count += corrected != x / scale
    return count


def mantissas(bits: int, every: int = 1) -> np.ndarray:
    """The numbers from 1 to 2 with so many bits of a mantissa, or every so many-th, and the last."""
    found = np.append(np.arange(0, 1 << bits, every), (1 << bits) - 1)
    return (found << (23 - bits) | 0x3F800000).astype(np.uint32).view(np.float32)


ALL_OF_FP16 = pytest.param(10, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("bits", "every"), [(7, 1), (10, 4999), ALL_OF_FP16])
def test_16_bit_numbers_are_divided_as_the_division_rounds(bits: int, every: int) -> None:
    assert wrong(mantissas(bits), mantissas(23, every)) == 0


def test_without_the_correction_many_quotients_are_others() -> None:
    numbers, scales = mantissas(7)[:, None], mantissas(23, 4999)[None, :]
    assert (numbers * (np.float32(1) / scales) != numbers / scales).mean() > 0.1
