"""The layout ``moectl-mtile64`` against its index formulas, and against the arithmetic it is made for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moectl.convert.layouts.registry import layout_named
from moectl.errors import CheckpointError
from moectl.problem.schemes import FULL, MXFP4, MXFP8, NVFP4, int_format
from support.layout_cases import canonical_tensors, problem_for

from .test_formulas import codes_of, interleaved

LAYOUT = layout_named("moectl-mtile64")
ROWS = ("concatenated", "single")

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

PLACES = {
    0: ((15, 8, 7, 6), (31, 24, 23, 22)),
    1: ((19, 12, 11, 10), (3, 28, 27, 26)),
    2: ((9, 2, 1, 0), (25, 18, 17, 16)),
    3: ((21, 14, 13, 4), (5, 30, 29, 20)),
}
"""Bits of a word that hold sign, exponent and mantissa of an MXFP4 code, by register and half."""


def stored(weight, rows, role, hidden=256, intermediate=128):
    """Canonical rows in stored order, and the stored tensor of `role`."""
    problem = problem_for(LAYOUT, weight, rows, hidden, intermediate)
    tensors, outputs = canonical_tensors(problem), LAYOUT.recipe(problem).outputs
    t = tensors[role]
    if weight == NVFP4 and role.endswith("_scale"):
        t = tensors[role] = t % 127  # neither NaN nor negative
    plain = t.numpy() if t.dtype == torch.uint8 else t.view(torch.int16).numpy().view(np.uint16)
    if role in ("w13", "w2"):
        plain = codes_of(t, weight.bits)
    if role.startswith("w13") and rows != "single":
        plain = interleaved(plain, 8)
    return plain, outputs[role].apply({role: t}, {})


def rotated(x, by):
    """32-bit words turned right by `by` bits."""
    x = x.astype(np.uint32)
    return (x >> np.uint32(by)) | (x << np.uint32(32 - by))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("role", ["w13", "w2"])
@pytest.mark.parametrize(
    "weight", [MXFP4, NVFP4, int_format(4, 32), int_format(4, FULL, zero_point=True)], ids=str
)
def test_words_of_4_bit_codes(weight, rows, role):
    codes, tiles = stored(weight, rows, role)
    e, n, k = codes.shape
    assert tuple(tiles.shape) == (e, n // 64, k // 64, 2048)
    words = tiles.numpy().view(np.uint32).reshape(e, n // 64, k // 64, 4, 8, 4, 4)
    rng = np.random.default_rng(0)
    for _ in range(300):
        nb, kb = rng.integers(n // 64), rng.integers(k // 64)
        warp, g, c, j = rng.integers(4), rng.integers(8), rng.integers(4), rng.integers(4)
        want = np.zeros(e, dtype=np.uint32)
        for k8 in range(2):
            for h in range(2):
                for b in range(2):
                    row, column = 64 * nb + 16 * warp + g + 8 * h, 64 * kb + 16 * j + 2 * c + 8 * k8 + b
                    want |= _placed(codes[:, row, column].astype(np.uint32), 2 * k8 + h, b, weight)
        assert (words[:, nb, kb, warp, g, c, j] == want).all()


def _placed(code, register, b, weight):
    if weight not in (MXFP4, NVFP4):
        return code << np.uint32(16 * b + 4 * register)
    word = np.zeros_like(code)
    for bit, place in zip((3, 2, 1, 0), PLACES[register][b], strict=True):
        word |= (code >> np.uint32(bit) & np.uint32(1)) << np.uint32(place)
    return word


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("role", ["w13", "w2"])
@pytest.mark.parametrize("weight", [MXFP8, int_format(8, 32), int_format(8, 128, zero_point=True)], ids=str)
def test_bytes_of_8_bit_codes(weight, rows, role):
    codes, tiles = stored(weight, rows, role)
    e, n, k = codes.shape
    assert tuple(tiles.shape) == (e, n // 64, k // 64, 4096)
    data = tiles.numpy().reshape(e, n // 64, k // 64, 4096)
    rng = np.random.default_rng(0)
    for _ in range(500):
        row, column = rng.integers(n), rng.integers(k)
        warp, h, g = row % 64 // 16, row % 16 // 8, row % 8
        j, k8, c, b = column % 64 // 16, column % 16 // 8, column % 8 // 2, column % 2
        piece = (((warp * 2 + j // 2) * 8 + g) * 4 + c) * 2 + j % 2
        at = (piece * 2 + k8) * 4 + 2 * b + h
        want = codes[:, row, column] ^ (0 if weight == MXFP8 else 0x80)
        assert (data[:, row // 64, column // 64, at] == want).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("matrix", ["w13", "w2"])
@pytest.mark.parametrize("weight", LAYOUT.weights, ids=str)
def test_scale_and_zero_words(weight, rows, matrix):
    for kind in ("scale", "zero") if weight.zero_point else ("scale",):
        values, words = stored(weight, rows, f"{matrix}_{kind}")
        e, n, _ = values.shape
        got = words.numpy().view(np.uint32)
        row = np.arange(n).reshape(n // 64, 4, 2, 8)
        if weight == NVFP4:
            _check_pairs(values, got.reshape(e, n // 64, -1, 4, 8, 2), row)
            continue
        if weight in (MXFP4, MXFP8):
            width, mask = 8, 255
            parts = [((), row[:, :, h], kg, 2, 16 * h + 8 * kg) for h in range(2) for kg in range(2)]
            got = got.reshape(e, n // 64, -1, 4, 8)
        elif weight.group == 32:
            width, mask = 16, 0xFFFF
            parts = [((h,), row[:, :, h], kg, 2, 16 * kg) for h in range(2) for kg in range(2)]
            got = got.reshape(e, n // 64, -1, 4, 8, 2)
        else:
            width, mask = 16, 0xFFFF
            parts = [((), row[:, :, h], 0, 1, 16 * h) for h in range(2)]
            got = got.reshape(e, n // 64, -1, 4, 8)
        assert width * len(parts) == 32 * (2 if got.ndim == 6 else 1)
        for word, rows_, first, step, shift in parts:
            want = values[:, rows_, first::step].transpose(0, 1, 4, 2, 3)
            assert (got[(..., *word)] >> np.uint32(shift) & np.uint32(mask) == want).all()


def _check_pairs(values, words, row):
    """NVFP4 scales, by mask and rotation, are bf16 numbers of 2^-120 their values, rows g in the low half."""
    mask = np.uint32(0x07F007F0)
    numbers = torch.from_numpy(values).view(torch.float8_e4m3fn).double().numpy()
    for jj in range(2):
        for jl, pair in enumerate((words[..., jj] & mask, rotated(words[..., jj], 25) & mask)):
            for h in range(2):
                want = numbers[:, row[:, :, h], 2 * jj + jl :: 4].transpose(0, 1, 4, 2, 3)
                half = (pair >> np.uint32(16 * h) & np.uint32(0xFFFF)).astype(np.uint16)
                assert (_bf16(half) * 2.0**120 == want).all()


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xB8])
def test_scales_of_nvfp4_are_numbers_that_are_not_negative(byte):
    problem = problem_for(LAYOUT, NVFP4, "concatenated", 128, 64)
    outputs = LAYOUT.recipe(problem).outputs
    scales = torch.full(canonical_tensors(problem)["w2_scale"].shape, 0x38, dtype=torch.uint8)
    assert outputs["w2_scale"].apply({"w2_scale": scales}, {}).any()
    scales[-1, -1, -1] = byte
    with pytest.raises(CheckpointError, match="not negative: at most 126 is supported"):
        outputs["w2_scale"].apply({"w2_scale": scales}, {})


@pytest.mark.parametrize("rows", ROWS)
def test_global_scales_are_stored_as_they_are(rows):
    problem = problem_for(LAYOUT, NVFP4, rows, 128, 64)
    recipe = LAYOUT.recipe(problem)
    halves = 1 if rows == "single" else 2
    assert recipe.stored["w13_global"] == ("F32", (2, halves, 1)) and recipe.stored["w2_global"].shape == (
        2,
        1,
        1,
    )
    factors = torch.arange(2.0 * halves).view(2, halves, 1)
    assert recipe.outputs["w13_global"].apply({"w13_global": factors}, {}).equal(factors)
    assert set(recipe.kept) <= {"w13_input", "w2_input"}


def test_mxfp4_words_turn_into_bf16_in_nine_operations():
    codes, tiles = stored(MXFP4, "single", "w2")
    x = tiles.numpy().view(np.uint32)
    keep = np.uint32(0x81C081C0)
    registers = (
        x & keep,
        rotated(x, 4) & keep,
        (x << np.uint32(6)) & keep,
        (rotated(x, 6) & np.uint32(0x81808180)) | (x << np.uint32(2) & np.uint32(0x00400040)),
    )
    magnitude = np.array(E2M1, dtype=np.float32)
    want = np.where(codes > 7, -1.0, 1.0) * magnitude[codes & 7]
    _check_registers(registers, want, lambda half: _bf16(half) * np.float64(2.0**126))


def test_int4_words_turn_into_numbers():
    codes, tiles = stored(int_format(4, 128), "single", "w2")
    x = tiles.numpy().view(np.uint32)
    registers = [x >> np.uint32(4 * r) & np.uint32(0x000F000F) | np.uint32(0x43004300) for r in range(4)]
    _check_registers(registers, codes.astype(np.float64), lambda half: _bf16(half) - 128)


def _check_registers(registers, want, number):
    e, n, k = want.shape
    for r, register in enumerate(registers):
        words = register.reshape(e, n // 64, k // 64, 4, 8, 4, 4)
        for b in range(2):
            half = number((words >> np.uint32(16 * b) & np.uint32(0xFFFF)).astype(np.uint16))
            k8, h = divmod(r, 2)
            there = want.reshape(e, n // 64, 4, 2, 8, k // 64, 4, 2, 4, 2)[:, :, :, h, :, :, :, k8, :, b]
            assert (half == there.transpose(0, 1, 4, 2, 3, 6, 5)).all()


def _bf16(half):
    return (half.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def _fp16(half):
    return half.view(np.float16).astype(np.float64)


def test_int8_words_turn_into_numbers():
    codes, tiles = stored(int_format(8, 128), "single", "w2")
    e, n, k = codes.shape
    x = tiles.numpy().view(np.uint32).reshape(e, n // 64, k // 64, 4, 2, 8, 4, 2, 2)
    want = codes.astype(np.float64).reshape(e, n // 64, 4, 2, 8, k // 64, 2, 2, 2, 4, 2) - 128
    for h in range(2):
        y = x >> np.uint32(8 * h)
        low, sign = (
            y & np.uint32(0x007F007F) | np.uint32(0x43004300),
            y & np.uint32(0x00800080) | np.uint32(0xC300C300),
        )
        as_fp16 = y & np.uint32(0x00FF00FF) ^ np.uint32(0x64806480)
        for b in range(2):
            halves = [(t >> np.uint32(16 * b) & np.uint32(0xFFFF)).astype(np.uint16) for t in (low, sign)]
            there = want[:, :, :, h, :, :, :, :, :, :, b].transpose(0, 1, 4, 2, 5, 3, 8, 6, 7)
            assert (_bf16(halves[0]) + _bf16(halves[1]) == there).all()
            half = (as_fp16 >> np.uint32(16 * b) & np.uint32(0xFFFF)).astype(np.uint16)
            assert (_fp16(half) - 1152 == there).all()


def test_biases_meet_their_rows():
    problem = problem_for(LAYOUT, MXFP4, "concatenated", 128, 128)
    bias = torch.arange(256.0).bfloat16().expand(2, -1).contiguous()
    stored_bias = LAYOUT.chains(problem)["w13_bias"].apply(bias)[0].float()
    assert stored_bias[:16].tolist() == [*range(8), *range(128, 136)]
    assert stored_bias[16:32].tolist() == [*range(8, 16), *range(136, 144)]
