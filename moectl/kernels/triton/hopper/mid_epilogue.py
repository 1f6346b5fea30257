# mypy: ignore-errors
"""Epilogue of `mid_kernels`: from a tile's fp32 accumulators to results in global memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .activation_epilogue import activate_one, activate_rows
from .mid_loader import _first, _rest


@gluon.constexpr_function
def _sums(WIDTH):
    """Register layout of one warpgroup's [64, WIDTH] fp32 accumulator."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])


@gluon.jit
def _activated(acc, alpha, limit, WIDTH: gl.constexpr, HOW: gl.constexpr):
    """The activation of [64, WIDTH] accumulators, as [32, WIDTH]; without a gate as [64, WIDTH]."""
    ACT: gl.constexpr = HOW.activation
    return activate_rows(acc, alpha, limit, WIDTH, ACT) if HOW.gated else activate_one(acc, ACT)


@gluon.constexpr_function
def _rows_of(HEIGHT):
    """Register layout for storing [HEIGHT, columns] results: a thread has 8 adjacent rows, 16 bytes."""
    return gl.BlockedLayout([8, 1], [HEIGHT // 8, 256 // HEIGHT], [1, 4], [0, 1])


@gluon.jit
def _store_part(
    result, slots, Y, block, tokens, NX, place, AT: gl.constexpr, WIDTH: gl.constexpr, WIDE: gl.constexpr
):  # fmt: skip
    """Stores [64, WIDTH] results of a part of the reduction by slot, in fp32; `place` as in
    `tile_board.part_told`.

    As they lie in registers: eight adjacent rows of a token are a sector of memory, and fp32 does not fit
    where 16-bit results change their layout.
    """
    L: gl.constexpr = result.type.layout
    token = AT + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    columns = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    slot = slots.slice(AT, WIDTH).load(gl.SliceLayout(0, L))
    row = (slot.to(gl.int64) if WIDE else slot) * NX
    base = Y.to(gl.pointer_type(gl.float32), bitcast=True) + (place - 1).to(gl.int64) * NX
    live = gl.expand_dims(token < tokens, 0) & gl.expand_dims(columns < NX, 1)
    gl.store(base + (gl.expand_dims(row, 0) + gl.expand_dims(columns, 1)), result, mask=live)


@gluon.jit
def _store(
    acc, notes, Y, by_row, block, first, tokens, NX, alpha, limit,
    AT: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Stores [64, WIDTH] accumulators, tokens from AT on: activations by position, or results by slot.

    Notes are slots, router weights and, where a GEMM may be split, the place of `tile_board.part_told`.
    """
    slots, weights = notes[:2]
    bias, factors = by_row
    L: gl.constexpr = acc.type.layout
    if not HOW.exact:
        acc = acc * HOW.factor
    if HOW.halves:
        acc = acc * gl.expand_dims(gl.convert_layout(factors, gl.SliceLayout(1, L)), 1)
    if HOW.weighted:
        weight = gl.expand_dims(weights.slice(AT, WIDTH).load(gl.SliceLayout(0, L)), 0)
        if HOW.stage == 1:
            acc = acc * weight
    if HOW.bias:
        acc = acc + gl.expand_dims(gl.convert_layout(bias, gl.SliceLayout(1, L)), 1)
    if HOW.stage == 1:
        result = _activated(acc, alpha, limit, WIDTH, HOW)
    elif HOW.weighted:
        result = acc * weight
    else:
        result = acc
    if HOW.splits:
        if notes[2] > 0:
            _store_part(result, slots, Y, block, tokens, NX, notes[2], AT, WIDTH, HOW.wide)
        else:
            _store_rows(result, slots, Y, block, first, tokens, NX, AT, WIDTH, HOW)
    else:
        _store_rows(result, slots, Y, block, first, tokens, NX, AT, WIDTH, HOW)


@gluon.jit
def _store_rows(
    result, slots, Y, block, first, tokens, NX, AT: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Stores results in the dtype of Y: by position (stage 1) or by slot."""
    HEIGHT: gl.constexpr = result.shape[0]
    R: gl.constexpr = _rows_of(HEIGHT)
    result = gl.convert_layout(result.to(Y.dtype.element_ty), R)
    columns = block * HEIGHT + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, R))
    place = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, R))
    if HOW.stage == 1:
        base = Y + (first + AT).to(gl.int64) * NX
        row = place * NX
    else:
        base = Y
        slot = slots.slice(AT, WIDTH).load(gl.SliceLayout(0, R))
        row = (slot.to(gl.int64) if HOW.wide else slot) * NX
    target = base + (gl.expand_dims(row, 0) + gl.expand_dims(columns, 1))
    live = gl.expand_dims(AT + place < tokens, 0) & gl.expand_dims(columns < NX, 1)
    gl.store(target, result, mask=live)


@gluon.jit
def _store_sums(
    acc, notes, Y, by_row, block, first, tokens, NX, alpha, limit,
    AT: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """`_store` in steps of at most 32 columns, as more at once would not fit in registers."""
    HALF: gl.constexpr = WIDTH // 2
    QUARTER: gl.constexpr = WIDTH // 4
    if WIDTH <= 32:
        _store(acc, notes, Y, by_row, block, first, tokens, NX, alpha, limit, AT, WIDTH, HOW)
    else:
        for h in gl.static_range(2):
            half = gl.split(acc.reshape([64, 2, HALF]).permute((0, 2, 1)))[h]
            if WIDTH <= 64:
                _store(
                    half, notes, Y, by_row, block, first, tokens, NX, alpha, limit, AT + h * HALF, HALF, HOW
                )  # fmt: skip
            else:
                for q in gl.static_range(2):
                    quarter = gl.split(half.reshape([64, 2, QUARTER]).permute((0, 2, 1)))[q]
                    _store(
                        quarter, notes, Y, by_row, block, first, tokens, NX, alpha, limit,
                        AT + h * HALF + q * QUARTER, QUARTER, HOW,
                    )  # fmt: skip


@gluon.jit
def _biases(B, expert, block, N, begin, HOW: gl.constexpr):
    """Biases of a row block in fp32, which belong to the part that begins at step 0; without a bias a
    placeholder of the same shape."""
    rows = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _sums(16)))
    if HOW.bias:
        live = (rows < N) & (begin == 0)
        bias = gl.load(B + expert.to(gl.int64) * N + rows, mask=live, other=0.0).to(gl.float32)
    else:
        bias = rows
    return bias


@gluon.jit
def _factors(F, expert, HOW: gl.constexpr):
    """The factors of 64 rows, in which 8 gates and 8 ups alternate; without factors a placeholder."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, _sums(16)))
    if HOW.halves == 2:
        factors = gl.load(F + expert * 2 + rows // 8 % 2)
    elif HOW.halves == 1:
        factors = gl.load(F + expert + rows * 0)
    else:
        factors = rows
    return factors


@gluon.jit
def _store_all(
    acc, notes, Y, by_row, block, first, tokens, NX, alpha, limit, WIDTH: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Stores both parts of a row block's accumulators."""
    sums, rest = acc
    _store_sums(sums, notes, Y, by_row, block, first, tokens, NX, alpha, limit, 0, _first(WIDTH), HOW)
    if _rest(WIDTH):
        _store_sums(
            rest, notes, Y, by_row, block, first, tokens, NX, alpha, limit, _first(WIDTH), _rest(WIDTH), HOW
        )  # fmt: skip
