# mypy: ignore-errors
"""Epilogue of `prefill_kernels`: from a tile's fp32 accumulators to results in global memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .activation_epilogue import activate_one, activate_rows
from .mid_epilogue import _store_part
from .mixed_width_wgmma import joined
from .prefill_tiles import _mma, _narrow, _rows_layout, _wide


@gluon.jit
def _store(
    acc, out, notes, Y, block, first, end, NX, alpha, limit,
    own: gl.constexpr, AT: gl.constexpr, TOKENS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Epilogue of weight row block `block`, index `own` in the tile, for TOKENS tokens from token AT on.

    The rows of Y are positions from `first` on in GEMM 1, and slots in GEMM 2.
    """
    slots, weights, bias, factors = notes
    COLUMNS: gl.constexpr = 32 if HOW.gated else 64
    M: gl.constexpr = _mma(TOKENS)
    if not HOW.exact:
        acc = acc * HOW.factor
    if HOW.halves:
        acc = acc * gl.expand_dims(factors.load(gl.SliceLayout(1, M)), 1)
    if HOW.weighted:
        weight = gl.expand_dims(weights.slice(AT, TOKENS).load(gl.SliceLayout(0, M)), 0)
        if HOW.stage == 1:
            acc = acc * weight
    if HOW.bias:
        acc = acc + gl.expand_dims(bias.slice(64 * own, 64).load(gl.SliceLayout(1, M)), 1)
    if HOW.weighted and HOW.stage == 2:
        acc = acc * weight
    ACT: gl.constexpr = HOW.activation
    if HOW.gated:
        acc = activate_rows(acc, alpha, limit, TOKENS, ACT)
    elif ACT != "":
        acc = activate_one(acc, ACT)
    if HOW.splits:
        _store_parts(acc, slots, Y, block, end - first, NX, AT, TOKENS, HOW)
    else:
        _store_rows(acc, out, slots, Y, block, first, end, NX, AT, TOKENS, COLUMNS, HOW)


@gluon.jit
def _store_parts(
    acc, slots, Y, block, tokens, NX, AT: gl.constexpr, TOKENS: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Stores results of a part of the reduction, 32 tokens at a time; slots count rows of parts before."""
    place = gl.to_tensor(1)
    if TOKENS == 64:
        halves = gl.split(acc.reshape([64, 2, 32]).permute((0, 2, 1)))
        for i in gl.static_range(2):
            half = gl.convert_layout(halves[i], _mma(32), assert_trivial=True)
            _store_part(half, slots, Y, block, tokens, NX, place, AT + 32 * i, 32, HOW.wide)
    else:
        _store_part(acc, slots, Y, block, tokens, NX, place, AT, TOKENS, HOW.wide)


@gluon.jit
def _store_rows(
    acc, out, slots, Y, block, first, end, NX,
    AT: gl.constexpr, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Stores results in the dtype of Y, turned by way of `out`."""
    L: gl.constexpr = _rows_layout(COLUMNS)
    turned = out.slice(0, TOKENS).slice(0, COLUMNS, 1)
    turned.permute((1, 0)).store(acc.to(Y.dtype.element_ty))
    rows = first + AT + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L))
    live = rows < end
    if HOW.stage == 2:
        rows = slots.slice(AT, TOKENS).load(gl.SliceLayout(1, L))
    columns = block * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    p = Y + gl.expand_dims(rows.to(gl.int64) * NX, 1) + gl.expand_dims(columns, 0)
    gl.store(p, turned.load(L), mask=gl.expand_dims(live, 1) & gl.expand_dims(columns < NX, 0))


@gluon.jit
def _store_all(
    acc, low, out, notes, Y, block, first, end, NX, alpha, limit,
    own: gl.constexpr, UNITS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """`_store` of both accumulators, at most 64 tokens at a time, as more would not fit in registers."""
    WIDE: gl.constexpr = _wide(UNITS)
    NARROW: gl.constexpr = _narrow(UNITS)
    if NARROW:
        _store(low, out, notes, Y, block, first, end, NX, alpha, limit, own, WIDE, NARROW, HOW)
    if WIDE == 128:
        left, right = gl.split(acc.reshape([64, 2, 64]).permute((0, 2, 1)))
        left = gl.convert_layout(left, _mma(64), assert_trivial=True)
        right = gl.convert_layout(right, _mma(64), assert_trivial=True)
        _store(left, out, notes, Y, block, first, end, NX, alpha, limit, own, 0, 64, HOW)
        _store(right, out, notes, Y, block, first, end, NX, alpha, limit, own, 64, 64, HOW)
    else:
        _store(acc, out, notes, Y, block, first, end, NX, alpha, limit, own, 0, WIDE, HOW)


@gluon.jit
def _store_jointly(
    acc, out, notes, Y, block, first, end, NX, alpha, limit,
    own: gl.constexpr, UNITS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """`_store` of a joint accumulator, at most 64 tokens at a time."""
    for i in gl.static_range(UNITS // 4):
        part = joined(acc, 4 * i, 4)
        _store(part, out, notes, Y, block, first, end, NX, alpha, limit, own, 64 * i, 64, HOW)
    if UNITS % 4 >= 2:
        part = joined(acc, UNITS // 4 * 4, 2)
        _store(part, out, notes, Y, block, first, end, NX, alpha, limit, own, UNITS // 4 * 64, 32, HOW)
    if UNITS % 2:
        part = joined(acc, UNITS - 1, 1)
        _store(part, out, notes, Y, block, first, end, NX, alpha, limit, own, 16 * UNITS - 16, 16, HOW)
