# mypy: ignore-errors
"""Epilogue of `tma_kernels`: biases, scales and router weights of a tile, and the stores of its results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..token_codes_kernels import _divisor, _quotient, _scale_of
from .activation_epilogue import activate_columns
from .mid_epilogue import _store
from .mixed_width_wgmma import joined, side_by_side
from .prefill_tiles import _mma
from .shared_wgmma import unit_of, units_of
from .tile_board import scaled_at_end, tokens_scaled_at_end
from .tma_loader import in_groups, scale_count, scale_rows, stored_rows


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
    """Scales of the weights of a row block, by channel or tensor; 1/16 for INT4, which is decoded to 16 times
    its value; otherwise a placeholder."""
    row = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _mma(16)))
    scale = row
    if in_groups(HOW):
        scale = gl.full([64], 0.0625, gl.float32, gl.SliceLayout(1, _mma(16)))
    elif scaled_at_end(HOW):
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
    acc, notes, Y, row, tokens, NX,
    OF: gl.constexpr, AT: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Stores product OF of turned accumulators of the second GEMM: tokens from AT on by 128 weight rows from
    `row` on."""
    M: gl.constexpr = _mma(64)
    R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slots, weights = notes[0].slice(AT, 64), notes[1].slice(AT, 64)
    place = AT + gl.arange(0, 64, layout=gl.SliceLayout(1, R))
    to = Y + slots.load(gl.SliceLayout(1, R)).to(gl.int64) * NX
    for i in gl.static_range(2):
        part = joined(acc, OF * 8 + i * 4, 4)
        if HOW.weighted:
            part = part * gl.expand_dims(weights.load(gl.SliceLayout(1, M)), 1)
        result = gl.convert_layout(part.to(Y.dtype.element_ty), R)
        column = row + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, R))
        live = gl.expand_dims(place < tokens, 1) & gl.expand_dims(column < NX, 0)
        gl.store(gl.expand_dims(to, 1) + gl.expand_dims(column, 0), result, mask=live)


@gluon.jit
def _largest_of_both(largest, exchange, met, phase, ME: gl.constexpr):
    """The larger one of what the two workers have for each of 64 tokens, by way of `exchange`, which has room
    for both. Their meeting at `met` completes its phase `phase`."""
    exchange.slice(64 * ME, 64).store(largest)
    mbarrier.arrive(met.index(0), count=1)
    mbarrier.wait(met.index(0), phase)
    return gl.maximum(largest, exchange.slice(64 - 64 * ME, 64).load(largest.type.layout))


@gluon.constexpr_function
def _rounded_asm(DTYPE):
    return f"cvt.rn.{DTYPE}x2.f32 $0, $2, $1;"


@gluon.constexpr_function
def _lifted_asm(DTYPE):
    if DTYPE == "bf16":
        return (
            "{ .reg .b32 a, b; cvt.rn.bf16x2.f32 a, $3, $3; mul.rn.bf16x2 b, $2, a; "
            "shl.b32 $0, b, 16; and.b32 $1, b, 0xffff0000; }"
        )
    return "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"


@gluon.constexpr_function
def _sixteen(HOW):
    """The dtype of activations as PTX spells it."""
    return "bf16" if HOW.codes == "bf16" else "f16"


@gluon.jit
def _rounded(x, HOW: gl.constexpr):
    """`x` in the dtype of activations; two numbers at a time, as Triton would not."""
    ASM: gl.constexpr = _rounded_asm(_sixteen(HOW))
    if HOW.codes == "bf16":
        made = gl.inline_asm_elementwise(ASM, "=r,f,f", [x], gl.bfloat16, True, 2)
    else:
        made = gl.inline_asm_elementwise(ASM, "=r,f,f", [x], gl.float16, True, 2)
    return made


@gluon.jit
def _lifted(x, lift, HOW: gl.constexpr):
    """`x` times `lift`, in fp32: for fp16 `x` itself, whose scales are too large for another `lift` than 1
    unless all of it is zero."""
    ASM: gl.constexpr = _lifted_asm(_sixteen(HOW))
    return gl.inline_asm_elementwise(ASM, "=f,=f,r,f,f", [x, lift], gl.float32, True, 2)


@gluon.jit
def _code_pairs(even, odd):
    """The E4M3 codes of adjacent numbers, next to each other in 16 bits."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $2; "
        "mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [even, odd],
        gl.int16,
        True,
        2,
    )


@gluon.jit
def _store_codes(
    acc, exchange, met, meeting, Y, YS, nt, first, tokens, NX, alpha, limit,
    WIDTH: gl.constexpr, ME: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Stores activations of turned accumulators as E4M3 codes, as `quantize_rows` would: the 128 columns of
    row tile `nt` share a scale in each token, which goes to YS ``[T, ceil(NX / 128)]``. Returns the phase
    of the workers' next meeting at `met`; `meeting` is that of the coming one.

    A worker has 64 tokens with all of these columns, or if there are no more, half of the columns of each.
    Y are pairs of codes. A thread has those of two adjacent columns in eight; two such pairs go to shared
    memory side by side, where words of 16 bytes are full then, and are put in order after they are read.
    """
    ACT: gl.constexpr = HOW.activation
    PARTS: gl.constexpr = WIDTH // 32
    PAIRS: gl.constexpr = WIDTH // 2
    AT: gl.constexpr = 64 * ME if WIDTH == 128 else 0
    FIRST: gl.constexpr = 0 if WIDTH == 128 else 32 * ME
    M: gl.constexpr = _mma(PAIRS)
    R: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PAIRS, PAIRS // 8], [4, 1], [1, 0])
    parts = ()
    size = acc[0]
    for i in gl.static_range(PARTS):
        part = activate_columns(joined(acc, 4 * i, 4), alpha, limit, ACT)
        parts += (_rounded(part, HOW),)
        size = gl.abs(part) if i == 0 else gl.maximum(size, gl.abs(part))
    largest = _rounded(gl.max(size, 1), HOW).to(gl.float32)
    if WIDTH == 64:
        largest = _largest_of_both(largest, exchange, met, meeting, ME)
        meeting ^= 1
    scale = _scale_of(largest, HOW.powers)
    lift, lifted, reciprocal = _divisor(gl.expand_dims(scale, 1))
    codes = ()
    for i in gl.static_range(PARTS):
        part = _quotient(_lifted(parts[i], lift, HOW), lifted, reciprocal)
        even, odd = gl.split(part.reshape([64, 16, 2]))
        codes += (_code_pairs(even, odd),)
    pairs = side_by_side(codes, 0, PARTS).reshape([64, PAIRS // 8, 2, 4]).permute((0, 1, 3, 2))
    pairs = gl.convert_layout(pairs.reshape([64, PAIRS]), M, assert_trivial=True)
    pairs = gl.convert_layout(pairs, R).reshape([64, PAIRS // 8, 4, 2]).permute((0, 1, 3, 2))
    pairs = gl.convert_layout(pairs.reshape([64, PAIRS]), R)
    place = AT + gl.arange(0, 64, layout=gl.SliceLayout(1, R))
    pair = nt * 64 + FIRST + gl.arange(0, PAIRS, layout=gl.SliceLayout(0, R))
    to = Y + (first + place).to(gl.int64) * (NX // 2)
    live = gl.expand_dims(place < tokens, 1) & gl.expand_dims(pair < NX // 2, 0)
    gl.store(gl.expand_dims(to, 1) + gl.expand_dims(pair, 0), pairs, mask=live)
    if FIRST == 0:
        place = AT + gl.arange(0, 64, layout=scale.type.layout)
        gl.store(YS + ((first + place) * ((NX + 127) // 128) + nt), scale, mask=place < tokens)
    return meeting


@gluon.jit
def _scaled(part, notes, factors, AT: gl.constexpr, HOW: gl.constexpr):
    """Sums of tokens from token AT on, times the scales of rows and tokens if these are not in blocks."""
    if scaled_at_end(HOW):
        L: gl.constexpr = part.type.layout
        factor = gl.expand_dims(gl.convert_layout(factors, gl.SliceLayout(1, L)), 1)
        if tokens_scaled_at_end(HOW):
            of_tokens = notes[2].slice(AT, part.shape[1]).load(gl.SliceLayout(0, L))
            factor = factor * gl.expand_dims(of_tokens, 0)
        part = part.to(gl.float32) * factor
    return part
