# mypy: ignore-errors
"""Epilogue of `tma_kernels`: biases, scales and router weights of a tile, and the stores of its results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .activation_epilogue import activate_columns
from .mid_epilogue import _store
from .mixed_width_wgmma import joined
from .prefill_tiles import _mma
from .shared_wgmma import unit_of, units_of
from .tma_loader import scale_count, scale_rows, stored_rows
from .tma_tiles import scaled_at_end


@gluon.jit
def _biases(B, expert, block, N, HOW: gl.constexpr):
    """Biases of a row block in fp32; without a bias a placeholder of the same shape."""
    row = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _mma(16)))
    bias = row
    if HOW.bias:
        pair, half, there = stored_rows(row, N, HOW)
        source = expert.to(gl.int64) * N + pair + half * (N // 2)
        bias = gl.load(B + source, mask=there, other=0.0).to(gl.float32)
    return bias


@gluon.jit
def _row_scales(S, expert, block, N, HOW: gl.constexpr):
    """Scales of the weights of a row block, by channel or tensor; otherwise a placeholder."""
    row = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _mma(16)))
    scale = row
    if scaled_at_end(HOW):
        at, there = scale_rows(row, N, HOW)
        scale = gl.load(S + expert.to(gl.int64) * scale_count(N, HOW) + at, mask=there, other=0.0)
    return scale


@gluon.jit
def _store_block(
    acc, notes, Y, factors, bias, block, first, tokens, NX, alpha, limit,
    OF: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Stores row block OF of the accumulators in steps of 32 columns, as more would not fit in registers.

    `factors` are the scales of its rows, if they apply to the sums.
    """
    UNITS: gl.constexpr = units_of(WIDTH)
    PAIRS: gl.constexpr = UNITS // 2
    for i in gl.static_range(PAIRS):
        part = _scaled(joined(acc, OF * UNITS + 2 * i, 2), notes, factors, 32 * i, HOW)
        _store(part, notes[:2], Y, (bias, bias), block, first, tokens, NX, alpha, limit, 32 * i, 32, HOW)
    if UNITS % 2:
        LAST: gl.constexpr = unit_of(WIDTH)
        part = _scaled(acc[OF * UNITS + UNITS - 1], notes, factors, WIDTH - LAST, HOW)
        _store(
            part, notes[:2], Y, (bias, bias), block, first, tokens, NX, alpha, limit, WIDTH - LAST, LAST, HOW
        )  # fmt: skip


@gluon.jit
def _store_turned(
    acc, notes, Y, row, first, tokens, NX, alpha, limit,
    OF: gl.constexpr, AT: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Stores product OF of turned accumulators: tokens from AT on by 128 weight rows from `row` on."""
    ACT: gl.constexpr = HOW.activation
    M: gl.constexpr = _mma(64)
    COLUMNS: gl.constexpr = 32 if HOW.stage == 1 else 64
    R: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    slots, weights = notes[0].slice(AT, 64), notes[1].slice(AT, 64)
    place = AT + gl.arange(0, 64, layout=gl.SliceLayout(1, R))
    to = first + place
    if HOW.stage == 2:
        to = slots.load(gl.SliceLayout(1, R))
    to = Y + to.to(gl.int64) * NX
    for i in gl.static_range(2):
        part = joined(acc, OF * 8 + i * 4, 4)
        at = row + i * 64
        if HOW.stage == 1:
            part = activate_columns(part, alpha, limit, ACT)
            at = at // 2
        elif HOW.weighted:
            part = part * gl.expand_dims(weights.load(gl.SliceLayout(1, M)), 1)
        result = gl.convert_layout(part.to(Y.dtype.element_ty), R)
        column = at + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, R))
        live = gl.expand_dims(place < tokens, 1) & gl.expand_dims(column < NX, 0)
        gl.store(gl.expand_dims(to, 1) + gl.expand_dims(column, 0), result, mask=live)


@gluon.jit
def _scaled(part, notes, factors, AT: gl.constexpr, HOW: gl.constexpr):
    """Sums of tokens from token AT on, times the scales of rows and tokens if these are not in blocks."""
    if scaled_at_end(HOW):
        L: gl.constexpr = part.type.layout
        of_rows = gl.convert_layout(factors, gl.SliceLayout(1, L))
        of_tokens = notes[2].slice(AT, part.shape[1]).load(gl.SliceLayout(0, L))
        part = part * (gl.expand_dims(of_rows, 1) * gl.expand_dims(of_tokens, 0))
    return part
