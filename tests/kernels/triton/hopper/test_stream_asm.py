"""The streaming kernels' assembly, run instruction by instruction on a simulated warp."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moectl.kernels.triton.hopper.stream_asm import CODES, SumsAsm, TileAsm
from support.simulated_warp import C, G, Register, as_f32, execute, f32, halves, paired

TOKENS, COLUMNS, ROWS = 8, 64, 16

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_PLACES = (
    ((15, 8, 7, 6), (31, 24, 23, 22)),
    ((19, 12, 11, 10), (3, 28, 27, 26)),
    ((9, 2, 1, 0), (25, 18, 17, 16)),
    ((21, 14, 13, 4), (5, 30, 29, 20)),
)
"""Bits of a code (sign, exponent, mantissa) by register and half word."""


def words_of(codes: NDArray[np.int64], weight: str) -> list[Register]:
    """A lane's words of [16, 64] codes, as the layout ``moectl-mtile64`` places them."""
    registers = 8 if weight in ("int8", "mxfp8") else 4
    words = [np.zeros(32, np.uint32) for _ in range(registers)]
    for j, k8, h, b in product(range(4), range(2), range(2), range(2)):
        code = codes[G + 8 * h, 16 * j + 2 * C + 8 * k8 + b].astype(np.uint32)
        if weight == "int8":
            words[2 * j + k8] |= (code ^ 0x80) << np.uint32(8 * (2 * b + h))
        elif weight == "mxfp8":
            words[2 * j + k8] |= code << np.uint32(8 * (2 * b + h))
        elif weight == "int4":
            words[j] |= code << np.uint32(16 * b + 4 * (2 * k8 + h))
        else:
            for i, place in enumerate(E2M1_PLACES[2 * k8 + h][b]):
                words[j] |= (code >> np.uint32(3 - i) & 1) << np.uint32(place)
    return words


def tokens_of(x: torch.Tensor) -> list[Register]:
    """A lane's eight words of [8, 64] tokens: the B operands of four k16 steps."""
    return [paired(x[G[:, None], 16 * j + 2 * C[:, None] + 8 * k8 + np.arange(2)])
            for j in range(4) for k8 in range(2)]  # fmt: skip


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()


def pairs_of(scales: NDArray[np.uint8], jj: int) -> Register:
    """A lane's word of E4M3 scales [16, 4] for groups 2 * jj and 2 * jj + 1: `word_orders.E4M3_PAIRS`."""
    word = np.zeros(32, np.uint32)
    for h, jl, bit in product(range(2), range(2), range(7)):
        at = ((29 if h == 0 else 13) if jl else (4 if h == 0 else 20)) + bit
        word |= (scales[G + 8 * h, 2 * jj + jl].astype(np.uint32) >> bit & 1) << np.uint32(at % 32)
    return word


def spread(values: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    return np.repeat(values, COLUMNS // groups, 1)


KINDS = [
    ("mxfp4", "bf16", "bf16", True, False, False),
    ("mxfp4", "bf16", "bf16", True, False, True),
    ("mxfp4", "fp16", "bf16", True, False, False),
    ("nvfp4", "bf16", "bf16", False, False, False),
    ("nvfp4", "fp16", "fp16", False, False, False),
    *(
        ("mxfp8", tokens, "bf16", True, False, whole)
        for tokens, whole in product(("bf16", "fp16"), (False, True))
    ),
    *(
        (weight, tokens, scale, in_two, zeros, False)
        for weight, tokens, scale, in_two, zeros in product(
            ("int4", "int8"), ("bf16", "fp16"), ("bf16", "fp16"), (True, False), (False, True)
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_tile_is_the_product(kind: tuple[str, str, str, bool, bool, bool], blocks: int) -> None:
    weight, dtype, scale, in_two, zeros, whole = kind
    asm = TileAsm(weight, dtype, scale, in_two, zeros, whole, blocks)
    draw = np.random.default_rng(blocks)
    groups = 4 if weight == "nvfp4" else 2 if in_two else 1
    most = 256 if weight in ("int8", "mxfp8") else 16
    codes = draw.integers(0, most, (ROWS, COLUMNS))
    if weight == "mxfp8":
        codes -= (codes & 0x7F) == 0x7F  # the next test has NaN
    floats = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if weight == "nvfp4":
        stored = torch.from_numpy(draw.integers(0, 127, (ROWS, 4)).astype(np.uint8))
        scales = e4m3(stored.numpy())
        scale_words = [pairs_of(stored.numpy(), jj) for jj in range(2) for _ in range(4)]
        decoded = np.where(codes & 8, -1, 1) * np.take(E2M1, codes & 7)
    elif weight in ("mxfp4", "mxfp8"):
        low = 0 if whole and dtype == "bf16" else 110
        exponents = np.repeat(draw.integers(low, 140, (ROWS, 1)), groups, 1)
        exponents[0] = low
        scales = np.exp2(exponents - 127.0)
        packed = sum(exponents[G + 8 * h, k].astype(np.uint32) << np.uint32(8 * (2 * h + k))
                     for h in range(2) for k in range(2))  # fmt: skip
        scale_words = [packed] * 8
        decoded = np.where(codes & 8, -1, 1) * np.take(E2M1, codes & 7)
        if weight == "mxfp8":
            decoded = e4m3(codes.astype(np.uint8))
    else:
        stored = torch.from_numpy(draw.uniform(0.5, 2, (ROWS, groups))).to(floats[scale])
        scales = stored.double().numpy()
        scale_words = _row_words(lambda rows, k: paired(stored[rows, k]), in_two)
        zero = draw.integers(0, most, (ROWS, groups)) if zeros else np.full((ROWS, groups), most // 2)
        zero_words = _row_words(
            lambda rows, k: (zero[rows, k][:, 0] | zero[rows, k][:, 1] << 16).astype(np.uint32), in_two
        )
        decoded = codes - spread(zero.astype(float), groups)
    text, constraints = asm
    operands = [*words_of(codes, weight), *scale_words, *(zero_words if zeros else [])]
    expected = []
    for _ in range(blocks):
        x = torch.from_numpy(draw.normal(size=(TOKENS, COLUMNS))).to(floats[dtype])
        start = draw.normal(size=(ROWS, TOKENS)).astype(np.float32).astype(float)
        shift = CODES[weight, dtype].shift
        if shift:
            start *= 0.0
        stored_x = x * 2.0**64 if shift and dtype == "bf16" else x
        operands += tokens_of(stored_x)
        operands += [f32(start[G + 8 * (i // 2), 2 * C + i % 2]) for i in range(4)]
        factor = halves(np.full(32, asm.factor, np.uint32), dtype)[0, 0]
        if asm.factor:
            for k in range(groups):
                sums = x.double().numpy().reshape(TOKENS, groups, -1).sum(2)[:, k] * factor
                operands += [f32(sums[2 * C + i % 2]) for i in range(4)]
        times = 1.0 if whole and dtype == "bf16" else 2.0**-shift
        product_ = (decoded * spread(scales, groups)) @ x.double().numpy().T
        expected.append(start + product_ * times)
    outputs = 4 * blocks
    assert constraints.count(",") + 1 == outputs + len(operands)
    registers = {f"${outputs + i}": r for i, r in enumerate(operands)}
    execute(text, registers)
    for n, wanted in enumerate(expected):
        got = np.zeros((ROWS, TOKENS))
        for i in range(4):
            got[G + 8 * (i // 2), 2 * C + i % 2] = as_f32(registers[f"${4 * n + i}"])
        assert (np.abs(got - wanted) <= 2e-4 * np.abs(wanted).max(1, keepdims=True)).all()


def _row_words(
    word: Callable[[NDArray[np.int64], NDArray[np.int64]], Register], in_two: bool
) -> list[Register]:
    """Scale or zero words as the kernels hand them over: four copies, twice."""
    if in_two:
        k = np.tile(np.arange(2), (32, 1))
        return [word((G + 8 * h)[:, None], k) for h in range(2) for _ in range(4)]
    return [word(np.stack([G, G + 8], 1), np.zeros((32, 2), int))] * 8


@pytest.mark.parametrize("in_two", [False, True])
@pytest.mark.parametrize("weight", ["int4", "int8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_of_tokens(weight: str, dtype: str, in_two: bool) -> None:
    tile = TileAsm(weight, dtype, dtype, in_two, True, False, 1)
    x = torch.from_numpy(np.random.default_rng(1).integers(-8, 9, (TOKENS, COLUMNS))).to(
        torch.bfloat16 if dtype == "bf16" else torch.float16
    )
    row = 3
    select = np.where(row == G, tile.factor, 0).astype(np.uint32)
    operands = [*tokens_of(x), *[select] * 4, *[np.zeros(32, np.uint32)] * 4]
    registers = {f"${4 + i}": r for i, r in enumerate(operands)}
    text, constraints = SumsAsm(tile)
    assert constraints.count(",") + 1 == 4 + len(operands)
    execute(text, registers)
    sums = x.double().numpy().reshape(TOKENS, 2 if in_two else 1, -1).sum(2)
    for i in range(4 if in_two else 2):
        got = as_f32(registers[f"${i}"])
        assert np.array_equal(got, np.where(row == G, sums[2 * C + i % 2, i // 2], 0.0))


def test_every_format_is_run() -> None:
    assert {(weight, tokens) for weight, tokens, *_ in KINDS} == set(CODES)
