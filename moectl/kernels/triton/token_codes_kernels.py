# mypy: ignore-errors
"""Device code that quantizes tokens ``[ROWS, K]`` to E4M3 or INT8 codes with fp32 scales (`quantize_tokens`).

Scales are the largest magnitude / 448, or of INT8 / 127, codes the quotient, rounded to nearest, ties to
even, and saturated; both divisions are rounded once. INT8 has no codes for NaN and infinity: the scale of a
row with any of these is NaN. With `POWERS` scales are rounded up to powers of two. With `LIVE` other than
`ALL` only rows that hold tokens are read and written: the first ``IDS[E]`` (`SORTED`, `IDS` being offsets of
experts), or those with ids of experts (`SLOTS`). `LIVE`, `E`, `BESIDE` and the numbers of rows and columns
are no constants: what a layer's calls differ in is not compiled, but whether columns are a multiple of 16.
Programs take turns if there are fewer of them than it takes.
"""

import triton
import triton.language as tl

ALL = tl.constexpr(0)
SORTED = tl.constexpr(1)
SLOTS = tl.constexpr(2)

AT_ONCE, MIDDLE, NARROW = tl.constexpr(4096), tl.constexpr(2048), tl.constexpr(512)
"""Numbers that a program reads at once of rows with a scale each, and the widths of which it has several."""


@triton.jit
def _to_codes(v, CODES):
    """`v` in fp32 as `CODES` hold it: FP8 of GPUs that have it, whose conversion saturates, or uint8, where
    NaN stays NaN; or int8, for magnitudes up to 127."""
    if CODES.dtype.element_ty == tl.int8:
        # The sum is rounded to an integer, which its last bits are.
        codes = (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif CODES.dtype.element_ty == tl.uint8:
        v = tl.where(v > 448.0, 448.0, tl.where(v < -448.0, -448.0, v))
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
def _scale_of(largest, POWERS: tl.constexpr, LARGEST: tl.constexpr = 448.0):
    """The scale that maps `largest` to LARGEST: at least the smallest normal number, and with `POWERS`
    rounded up to a power of two."""
    scale = tl.maximum(tl.div_rn(largest, LARGEST), 1.1754943508222875e-38)
    if POWERS:
        # A mantissa other than zero carries into the exponent; infinity stays.
        scale = ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _divisor(scale):
    """What `_divided` takes of a scale: a power of two that keeps remainders normal, the scale times that,
    and the reciprocal of the product. An infinite scale gives 0 for the last two."""
    lift = tl.where(scale < 8.673617379884035e-19, 18446744073709551616.0, 1.0)  # 2**-60, 2**64
    lifted = scale * lift
    reciprocal = tl.div_rn(1.0, lifted)
    return lift, tl.where(lifted == float("inf"), 0.0, lifted), reciprocal


@triton.jit
def _quotient(x, lifted, reciprocal):
    """The lifted `x` over the scale of the `_divisor`, for numbers of 16 bits that are at most 448 times the
    scale; NaN for NaN and for infinite `x`.

    A product with the reciprocal and one correction are what the division rounds to, for all mantissas.
    """
    quotient = x * reciprocal
    return tl.fma(reciprocal * -1.0, tl.fma(lifted, quotient, x * -1.0), quotient)


@triton.jit
def _divided(x, scale, lift, lifted, reciprocal, X, DIVIDE: tl.constexpr):
    """`x` / `scale`, rounded once, for `x` as in `_quotient` if it has 16 bits where it comes from (X).

    Without fused multiply-add (DIVIDE) a product is not what the division rounds to.
    """
    if DIVIDE or X.dtype.element_ty.primitive_bitwidth == 32:
        quotient = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        quotient = _quotient(x * lift, lifted, reciprocal)
    return quotient


@triton.jit
def _by_rows(x, scale, X, DIVIDE: tl.constexpr):
    """`x` ``[rows, columns]`` over a scale for each row."""
    lift, lifted, reciprocal = _divisor(scale)
    return _divided(
        x, scale[:, None], lift[:, None], lifted[:, None], reciprocal[:, None], X, DIVIDE
    )  # fmt: skip


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
def _first_rows(IDS, ROWS, LIVE, E):
    """The number of first rows among which all are that hold a token."""
    rows = ROWS
    if LIVE == SORTED:
        rows = tl.minimum(rows, tl.load(IDS + E))
    return rows


@triton.jit
def _is_live(IDS, row, ROWS, LIVE, E):
    """Whether each `row` is one of the first ROWS and holds a token."""
    live = row < ROWS
    if LIVE == SLOTS:
        expert = tl.load(IDS + row, mask=live, other=-1)
        live = (expert >= 0) & (expert < E)
    return live


@triton.jit
def _some(live, LIVE):
    """Whether any row is `live`; with `LIVE` other than `SLOTS` there are no turns without such rows."""
    some = LIVE != SLOTS
    if LIVE == SLOTS:
        some = tl.max(live.to(tl.int32), 0) > 0
    return some


@triton.jit
def _blocks(IDS, at, ROWS, K, LIVE, E):
    """Places ``[blocks, 128]`` of blocks of 128 columns, counted row by row, which of them are read, and the
    blocks that hold a token."""
    across = tl.cdiv(K, 128)
    row = at // across
    live = _is_live(IDS, row, ROWS, LIVE, E)
    column = ((at - row * across) * 128)[:, None] + tl.arange(0, 128)[None, :]
    return (row.to(tl.int64) * K)[:, None] + column, live[:, None] & (column < K), live


@triton.jit(do_not_specialize=["ROWS", "LIVE", "E", "BESIDE"])
def _block_codes_kernel(
    X, CODES, SCALES, IDS, ROWS, K, LIVE, E, BESIDE,
    BLOCKS: tl.constexpr, POWERS: tl.constexpr, DIVIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A scale for each 128 columns, SCALES ``[ROWS, ceil(K / 128)]``; a program takes BLOCKS at once."""
    _begin(BESIDE, PDL)
    rows = _first_rows(IDS, ROWS, LIVE, E)
    for turn in range(tl.program_id(0), tl.cdiv(rows * tl.cdiv(K, 128), BLOCKS), tl.num_programs(0)):
        at = turn * BLOCKS + tl.arange(0, BLOCKS)
        place, mask, live = _blocks(IDS, at, rows, K, LIVE, E)
        if _some(live, LIVE):
            x = tl.load(X + place, mask=mask, other=0).to(tl.float32)
            scale = _scale_of(tl.max(tl.abs(x), 1), POWERS)
            tl.store(CODES + place, _to_codes(_by_rows(x, scale, X, DIVIDE), CODES), mask=mask)
            tl.store(SCALES + at, scale, mask=live)
    _end(BESIDE, PDL)


@triton.jit
def _token_codes(
    X, CODES, SCALES, IDS, turn, ROWS, K, LIVE, E,
    R: tl.constexpr, BK: tl.constexpr, POWERS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """The codes and scales of R rows of at most BK columns."""
    LARGEST: tl.constexpr = 127.0 if CODES.dtype.element_ty == tl.int8 else 448.0
    row = turn * R + tl.arange(0, R)
    live = _is_live(IDS, row, ROWS, LIVE, E)
    if _some(live, LIVE):
        columns = tl.arange(0, BK)[None, :]
        place, mask = (row.to(tl.int64) * K)[:, None] + columns, live[:, None] & (columns < K)
        x = tl.load(X + place, mask=mask, other=0).to(tl.float32)
        scale = _scale_of(tl.max(tl.abs(x), 1), POWERS, LARGEST)
        tl.store(CODES + place, _to_codes(_by_rows(x, scale, X, DIVIDE), CODES), mask=mask)
        if CODES.dtype.element_ty == tl.int8:
            spoiled = tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 1)
            scale = tl.where(spoiled > 0, float("nan"), scale)
        tl.store(SCALES + row, scale, mask=live)


@triton.jit
def _wide_codes(
    X, CODES, SCALES, row, K, POWERS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Codes and the scale of a row of more columns than are read at once."""
    LARGEST: tl.constexpr = 127.0 if CODES.dtype.element_ty == tl.int8 else 448.0
    columns = tl.arange(0, AT_ONCE)
    largest = tl.zeros((AT_ONCE,), dtype=tl.float32)
    spoiled = tl.zeros((AT_ONCE,), dtype=tl.int32)
    first_at = row * K.to(tl.int64)
    for first in range(0, K, AT_ONCE):
        x = tl.load(X + first_at + first + columns, mask=first + columns < K, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        if CODES.dtype.element_ty == tl.int8:
            spoiled |= (~(tl.abs(x) < float("inf"))).to(tl.int32)
    scale = _scale_of(tl.max(largest, 0), POWERS, LARGEST)
    lift, lifted, reciprocal = _divisor(scale)
    for first in range(0, K, AT_ONCE):
        at = first_at + first + columns
        x = tl.load(X + at, mask=first + columns < K, other=0).to(tl.float32)
        codes = _to_codes(_divided(x, scale, lift, lifted, reciprocal, X, DIVIDE), CODES)
        tl.store(CODES + at, codes, mask=first + columns < K)
    if CODES.dtype.element_ty == tl.int8:
        scale = tl.where(tl.max(spoiled, 0) > 0, float("nan"), scale)
    tl.store(SCALES + row, scale)


@triton.jit(do_not_specialize=["ROWS", "LIVE", "E", "BESIDE"])
def _token_codes_kernel(
    X, CODES, SCALES, IDS, ROWS, K, LIVE, E, BESIDE,
    POWERS: tl.constexpr, DIVIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A scale for each token, SCALES ``[ROWS]``; a program reads `AT_ONCE` numbers at a time: several narrow
    rows, or a part of a wide one."""
    _begin(BESIDE, PDL)
    rows = _first_rows(IDS, ROWS, LIVE, E)
    each = 1
    if K <= NARROW:
        each = AT_ONCE // NARROW
    elif K <= MIDDLE:
        each = AT_ONCE // MIDDLE
    # What is the same in all turns would take registers from one to the next.
    for turn in tl.range(tl.program_id(0), tl.cdiv(rows, each), tl.num_programs(0), disable_licm=True):
        if K <= NARROW:
            _token_codes(
                X, CODES, SCALES, IDS, turn, rows, K, LIVE, E, AT_ONCE // NARROW, NARROW, POWERS, DIVIDE
            )  # fmt: skip
        elif K <= MIDDLE:
            _token_codes(
                X, CODES, SCALES, IDS, turn, rows, K, LIVE, E, AT_ONCE // MIDDLE, MIDDLE, POWERS, DIVIDE
            )  # fmt: skip
        elif K <= AT_ONCE:
            _token_codes(X, CODES, SCALES, IDS, turn, rows, K, LIVE, E, 1, AT_ONCE, POWERS, DIVIDE)
        elif _is_live(IDS, turn, rows, LIVE, E):
            _wide_codes(X, CODES, SCALES, turn, K, POWERS, DIVIDE)
    _end(BESIDE, PDL)


@triton.jit(do_not_specialize=["ROWS", "LIVE", "E", "BESIDE"])
def _largest_kernel(
    X, LARGEST, IDS, ROWS, K, LIVE, E, BESIDE,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LARGEST ``[programs]``: the largest magnitude of what each program reads, BLOCKS blocks at a time."""
    _begin(BESIDE, PDL)
    largest = tl.zeros((BLOCKS, 128), dtype=tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    rows = _first_rows(IDS, ROWS, LIVE, E)
    for turn in range(program, tl.cdiv(rows * tl.cdiv(K, 128), BLOCKS), programs):
        place, mask, live = _blocks(IDS, turn * BLOCKS + tl.arange(0, BLOCKS), rows, K, LIVE, E)
        if _some(live, LIVE):
            largest = tl.maximum(largest, tl.abs(tl.load(X + place, mask=mask, other=0).to(tl.float32)))
    tl.store(LARGEST + program, tl.max(tl.max(largest, 1), 0))
    _end(BESIDE, PDL)


@triton.jit(do_not_specialize=["ROWS", "LIVE", "E", "BESIDE", "PROGRAMS"])
def _tensor_codes_kernel(
    X, CODES, SCALES, LARGEST, IDS, ROWS, K, LIVE, E, BESIDE, PROGRAMS,
    BLOCKS: tl.constexpr, BP: tl.constexpr, DYNAMIC: tl.constexpr, POWERS: tl.constexpr,
    DIVIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Codes by one scale, SCALES ``[1]``, which is given, or that of all LARGEST; BLOCKS blocks at once."""
    _begin(BESIDE, PDL)
    if DYNAMIC:
        every = tl.arange(0, BP)
        scale = _scale_of(tl.max(tl.load(LARGEST + every, mask=every < PROGRAMS, other=0.0), 0), POWERS)
        if tl.program_id(0) == 0:
            tl.store(SCALES, scale)
    else:
        scale = tl.load(SCALES)
    lift, lifted, reciprocal = _divisor(scale)
    rows = _first_rows(IDS, ROWS, LIVE, E)
    for turn in range(tl.program_id(0), tl.cdiv(rows * tl.cdiv(K, 128), BLOCKS), tl.num_programs(0)):
        place, mask, live = _blocks(IDS, turn * BLOCKS + tl.arange(0, BLOCKS), rows, K, LIVE, E)
        if _some(live, LIVE):
            x = tl.load(X + place, mask=mask, other=0).to(tl.float32)
            codes = _divided(x, scale, lift, lifted, reciprocal, X, DIVIDE)
            if not DYNAMIC:
                # A given scale may be too small for x, 0 or infinite: what is not corrected then is right.
                quotient = x * lift * reciprocal
                codes = tl.where(tl.abs(quotient) < 1024.0, codes, quotient)
            tl.store(CODES + place, _to_codes(codes, CODES), mask=mask)
    _end(BESIDE, PDL)
