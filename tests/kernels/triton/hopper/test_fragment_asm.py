"""PTX of the fragments of NVFP4 and MXFP8: every code at every scale, on a simulated warp."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moectl.convert.layouts.word_orders import E2M1_ROTATED, E4M3_PAIRS
from moectl.kernels.triton.hopper import fragment_asm as asm
from support.simulated_warp import Register, execute, halves

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()


def permuted(words: Register, order: tuple[int, ...]) -> Register:
    bits = [(words >> np.uint32(source) & np.uint32(1)) << np.uint32(i) for i, source in enumerate(order)]
    return np.bitwise_or.reduce(bits)


def run(text: str, results: int, *operands: Register) -> list[Register]:
    registers = {f"${results + i}": operand for i, operand in enumerate(operands)}
    execute(text, registers)
    return [registers[f"${i}"] for i in range(results)]


def in_lanes(values: NDArray[np.integer]) -> Register:
    """The first 32 values, again from the first on."""
    return np.resize(values, 32).astype(np.uint32)


@pytest.mark.parametrize("half", [False, True])
def test_nvfp4_is_exact_at_every_scale(half: bool) -> None:
    dtype = "fp16" if half else "bf16"
    multiply, decode = asm._e4m3_multipliers_asm.fn(half), asm._e2m1_asm.fn(half, False)
    unfolded = asm.fold_factor("nvfp4", half)
    for start in range(0, 128, 4):
        scales = np.minimum(start + np.arange(4), 126).astype(np.uint8)
        word = permuted(in_lanes(scales.view("<u4")), E4M3_PAIRS.order)
        multipliers = run(multiply, 4, word)  # rows g and g + 8 of each group: bytes 0, 1 and 2, 3
        codes = np.arange(32) % 16
        for group in range(2):
            # Byte r has register r's codes, that of the low half in its low nibble.
            stored = sum(codes << 4 * nibble for nibble in range(8)).astype(np.uint32)
            a, b = multipliers[group], multipliers[2 + group]
            registers = run(decode, 4, permuted(stored, E2M1_ROTATED.order), a, a, a, a, b, b, b, b)
            want = np.where(codes > 7, -1, 1) * np.take(E2M1, codes & 7)
            for r, register in enumerate(registers):
                scale = e4m3(scales)[group + 2 * (r % 2)]
                assert (halves(register, dtype) * unfolded == (want * scale)[:, None]).all()


@pytest.mark.parametrize("exact", [False, True])
def test_mxfp8_at_every_scale(exact: bool) -> None:
    multiply, decode = asm._e8m0_multipliers_asm.fn(exact), asm._e4m3_asm.fn(exact)
    allowed = range(255) if exact else asm.FOLDED_SCALES["mxfp8"]
    factor = 1.0 if exact else asm.fold_factor("mxfp8")
    for scale in allowed:
        (multiplier, *_) = run(multiply, 4, in_lanes(np.array([scale * 0x01010101])))
        for first in range(0, 256, 32):
            codes = (first + np.arange(32)).astype(np.uint8)
            others = codes ^ 0x85
            words = codes * np.uint32(0x00010001) | others * np.uint32(0x01000100)
            low, high = run(decode, 2, words, *[multiplier] * 8)
            for register, of in ((low, codes), (high, others)):
                # A NaN code is only promised to be NaN if exact; layers with one are.
                known = np.full(32, True) if exact else (of & 0x7F) != 0x7F
                want = torch.from_numpy(e4m3(of) * 2.0 ** (scale - 127)).bfloat16().double().numpy()
                got = halves(register, "bf16") * factor
                assert np.array_equal(got[known, 0], want[known], equal_nan=True)
                assert np.array_equal(got[known, 1], want[known], equal_nan=True)
