# mypy: ignore-errors
"""Epilogue of `tma_kernels`: biases, scales and router weights of a tile, and the stores of its results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .activation_epilogue import activate_columns
from .mid_epilogue import _store
from .mid_loader import _cached
from .mixed_width_wgmma import joined
from .prefill_tiles import _mma
from .shared_wgmma import unit_of, units_of
from .tma_loader import notes_of, scale_count, scale_rows, slots_of, stored_rows


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


@gluon.constexpr_function
def _scaled_at_end(HOW):
    """Whether sums are multiplied by scales of rows and tokens."""
    return HOW.scales in ("channel", "tensor")


@gluon.jit
def _row_scales(S, expert, block, N, HOW: gl.constexpr):
    """Scales of the weights of a row block, by channel or tensor; otherwise a placeholder."""
    row = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _mma(16)))
    scale = row
    if _scaled_at_end(HOW):
        at, there = scale_rows(row, N, HOW)
        scale = gl.load(S + expert.to(gl.int64) * scale_count(N, HOW) + at, mask=there, other=0.0)
    return scale


@gluon.constexpr_function
def _notes_slots(HOW):
    """Whether a tile's slots are needed in its epilogue."""
    return HOW.stage == 2 or HOW.weighted or (_scaled_at_end(HOW) and HOW.token_scales == "token")


@gluon.jit
def _slots_ahead(SORTED, first, tokens, HOW: gl.constexpr):
    """The slots of a tile's tokens, each thread's own."""
    place = gl.arange(0, notes_of(HOW), layout=gl.BlockedLayout([1], [32], [4], [0]))
    slot = place * 0
    if _notes_slots(HOW):
        slot = slots_of(SORTED, first, place, place < tokens, HOW)
    return slot


@gluon.jit
def _weights_ahead(WEIGHTS, XS, slot, tokens, HOW: gl.constexpr):
    """Router weights of slots, and scales of the first GEMM's tokens; placeholders of what there is not."""
    place = gl.arange(0, notes_of(HOW), layout=gl.BlockedLayout([1], [32], [4], [0]))
    weight = place * 0.0
    scale = place * 0.0
    if HOW.weighted:
        weight = gl.load(WEIGHTS + slot, mask=place < tokens, other=0.0, cache_modifier=_cached(HOW))
    if _scaled_at_end(HOW) and HOW.stage == 1:
        row = slot // HOW.top_k if HOW.token_scales == "token" else place * 0
        scale = gl.load(XS + row, mask=place < tokens, other=0.0, cache_modifier=".cg")
    return weight, scale


@gluon.jit
def _note(notes, slot, weight, scale, HOW: gl.constexpr):
    """Keeps what a tile's epilogue needs of its tokens in shared memory."""
    if _notes_slots(HOW):
        notes[0].store(slot)
    if HOW.weighted:
        notes[1].store(weight)
    if _scaled_at_end(HOW) and HOW.stage == 1:
        notes[2].store(scale)


@gluon.jit
def _note_scales(note, XS, first, tokens, HOW: gl.constexpr):
    """Loads the scales of the second GEMM's tokens, which are complete once its first stage is filled."""
    if _scaled_at_end(HOW) and HOW.stage == 2:
        place = gl.arange(0, note.shape[0], layout=gl.BlockedLayout([1], [32], [4], [0]))
        row = place * 0
        if HOW.token_scales == "token":
            row = first + place
        note.store(gl.load(XS + row, mask=place < tokens, other=0.0, cache_modifier=".cg"))


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
    if _scaled_at_end(HOW):
        L: gl.constexpr = part.type.layout
        of_rows = gl.convert_layout(factors, gl.SliceLayout(1, L))
        of_tokens = notes[2].slice(AT, part.shape[1]).load(gl.SliceLayout(0, L))
        part = part * (gl.expand_dims(of_rows, 1) * gl.expand_dims(of_tokens, 0))
    return part
