# mypy: ignore-errors
"""Device code that quantizes tokens ``[ROWS, K]`` to E4M3 codes with fp32 scales, as `quantize_tokens` does.

Scales are the largest magnitude / 448, codes the quotient, rounded to nearest, ties to even, and saturated;
both divisions are rounded once. With `POWERS` scales are rounded up to powers of two. With `LIVE` other than
`ALL` only rows that hold tokens are read and written: the first ``IDS[E]`` (`SORTED`, `IDS` being offsets of
experts), or those with ids of experts (`SLOTS`). `LIVE`, `E` and `BESIDE` are no constants: what a layer's
calls differ in is not compiled.
"""

import triton
import triton.language as tl

ALL = tl.constexpr(0)
SORTED = tl.constexpr(1)
SLOTS = tl.constexpr(2)


@triton.jit
def _to_e4m3(v, CODES):
    """`v` in fp32 as `CODES` hold it: FP8 of GPUs that have it, or uint8. Saturates; NaN stays NaN."""
    v = tl.where(v > 448.0, 448.0, tl.where(v < -448.0, -448.0, v))
    if CODES.dtype.element_ty == tl.uint8:
        u = v.to(tl.uint32, bitcast=True)
        size = u & 0x7FFFFFFF
        # Normal numbers of E4M3 by their bits, smaller ones by adding 2**14, whose last bit is 2**-9.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(size > 0x7F800000, 0x7F, code) | ((u >> 24) & 0x80)
        codes = code.to(tl.uint8)
    else:
        codes = v.to(CODES.dtype.element_ty)
    return codes


@triton.jit
def _scale_of(largest, POWERS: tl.constexpr):
    """The scale that maps `largest` to 448: at least the smallest normal number, and with `POWERS` rounded up
    to a power of two."""
    scale = tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38)
    if POWERS:
        # A mantissa other than zero carries into the exponent; infinity stays.
        scale = ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _begin(BESIDE, PDL: tl.constexpr):
    """Waits for the inputs, unless the kernel runs beside the one that was launched before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if BESIDE == 0:
            tl.extra.cuda.gdc_wait()


@triton.jit
def _end(BESIDE, PDL: tl.constexpr):
    """Waits for the kernel that ran beside this one: the next kernel waits for this one only."""
    if PDL:  # noqa: SIM102 - the one is a constant
        if BESIDE != 0:
            tl.extra.cuda.gdc_wait()


@triton.jit
def _is_live(IDS, row, LIVE, E):
    """Whether `row` holds a token."""
    live = row >= 0
    if LIVE == SORTED:
        live = row < tl.load(IDS + E)
    elif LIVE == SLOTS:
        expert = tl.load(IDS + row)
        live = (expert >= 0) & (expert < E)
    return live


@triton.jit(do_not_specialize=["LIVE", "E", "BESIDE"])
def _block_codes_kernel(
    X, CODES, SCALES, IDS, K, LIVE, E, BESIDE,
    BLOCKS: tl.constexpr, POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A scale for each 128 columns, SCALES ``[ROWS, ceil(K / 128)]``; grid (rows, runs of BLOCKS blocks)."""
    _begin(BESIDE, PDL)
    row = tl.program_id(0).to(tl.int64)
    if _is_live(IDS, row, LIVE, E):
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(X + row * K + column, mask=column < K, other=0).to(tl.float32)
        scale = _scale_of(tl.max(tl.abs(x), 1), POWERS)
        tl.store(CODES + row * K + column, _to_e4m3(tl.div_rn(x, scale[:, None]), CODES), mask=column < K)
        blocks = tl.cdiv(K, 128)
        tl.store(SCALES + row * blocks + block, scale, mask=block < blocks)
    _end(BESIDE, PDL)


@triton.jit(do_not_specialize=["LIVE", "E", "BESIDE"])
def _token_codes_kernel(
    X, CODES, SCALES, IDS, K, LIVE, E, BESIDE,
    BK: tl.constexpr, POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A scale for each token, SCALES ``[ROWS]``; grid (rows)."""
    _begin(BESIDE, PDL)
    row = tl.program_id(0).to(tl.int64)
    if _is_live(IDS, row, LIVE, E):
        columns = tl.arange(0, BK)
        largest = tl.zeros((BK,), dtype=tl.float32)
        for first in range(0, K, BK):
            x = tl.load(X + row * K + first + columns, mask=first + columns < K, other=0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        scale = _scale_of(tl.max(largest, 0), POWERS)
        for first in range(0, K, BK):
            x = tl.load(X + row * K + first + columns, mask=first + columns < K, other=0).to(tl.float32)
            codes = _to_e4m3(tl.div_rn(x, scale), CODES)
            tl.store(CODES + row * K + first + columns, codes, mask=first + columns < K)
        tl.store(SCALES + row, scale)
    _end(BESIDE, PDL)


@triton.jit(do_not_specialize=["ROWS", "LIVE", "E", "BESIDE"])
def _largest_kernel(
    X, LARGEST, IDS, ROWS, K, LIVE, E, BESIDE,
    BK: tl.constexpr, POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LARGEST ``[programs]``: the largest magnitude of each program's rows, every so many-th."""
    _begin(BESIDE, PDL)
    columns = tl.arange(0, BK)
    largest = tl.zeros((BK,), dtype=tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(tl.cdiv(ROWS - program, programs)):
        row = program + turn * programs
        if _is_live(IDS, row, LIVE, E):
            at = X + row.to(tl.int64) * K
            for first in range(0, K, BK):
                x = tl.load(at + first + columns, mask=first + columns < K, other=0).to(tl.float32)
                largest = tl.maximum(largest, tl.abs(x))
    tl.store(LARGEST + tl.program_id(0), tl.max(largest, 0))
    _end(BESIDE, PDL)


@triton.jit(do_not_specialize=["LIVE", "E", "BESIDE", "PROGRAMS"])
def _tensor_codes_kernel(
    X, CODES, SCALES, LARGEST, IDS, K, LIVE, E, BESIDE, PROGRAMS,
    BK: tl.constexpr, BP: tl.constexpr, DYNAMIC: tl.constexpr, POWERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Codes by one scale, SCALES ``[1]``, which is given, or that of all LARGEST; grid (rows, columns)."""
    _begin(BESIDE, PDL)
    row = tl.program_id(0).to(tl.int64)
    if DYNAMIC:
        every = tl.arange(0, BP)
        scale = _scale_of(tl.max(tl.load(LARGEST + every, mask=every < PROGRAMS, other=0.0), 0), POWERS)
        if (row == 0) & (tl.program_id(1) == 0):
            tl.store(SCALES, scale)
    else:
        scale = tl.load(SCALES)
    if _is_live(IDS, row, LIVE, E):
        columns = tl.program_id(1) * BK + tl.arange(0, BK)
        x = tl.load(X + row * K + columns, mask=columns < K, other=0).to(tl.float32)
        tl.store(CODES + row * K + columns, _to_e4m3(tl.div_rn(x, scale), CODES), mask=columns < K)
    _end(BESIDE, PDL)
