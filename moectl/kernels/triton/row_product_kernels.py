# mypy: ignore-errors
"""Device code of the product of weights in rows, of 16 bits, FP8, INT8 or INT4, and a tile of tokens.

The product is computed transposed, ``acc[rows, tokens]``, as in `portable_product_kernels`. FP8 weights are
E4M3 codes with fp32 scales: `SCALE` is ``block`` (128 x 128), ``channel`` or ``tensor``. Tokens have 16 bits
(`TOKENS` is ``a16``), or for FP8 are E4M3 codes with fp32 scales XS: ``block`` ``[tokens, ceil(KX / 128)]``,
``token`` ``[tokens]`` or ``tensor`` ``[1]``.

Where both are codes, they are multiplied as FP8 if `X` and `W` are of that type, and otherwise, on GPUs
without it, as fp16, in which codes are exact. Sums of such products are added up in fp32 after each step of
at most 128 columns, since matrix units sum FP8 products with fewer bits. INT8 weights (`FORMAT` is ``s8``,
`SCALE` ``channel``) and INT8 tokens (``token``) are multiplied as they are, and summed exactly in int32. So
are INT4 weights (``s4``, two to a byte, with a scale for each ``group`` of 128 columns), 16 times as large as
they mean, and the sums of a step are added in fp32.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(a, x, acc, INTERP: tl.constexpr):
    """acc plus a [BN, k] times the transposed tokens x [BM, k], in fp32, or int32 of INT8."""
    if INTERP:
        acc += tl.dot(a.to(tl.float32), tl.trans(x.to(tl.float32))).to(acc.dtype)
    else:
        acc = tl.dot(a, tl.trans(x), acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def _keep(acc, INTERP: tl.constexpr):
    """`acc`, complete. Triton 3.6 leaves wgmmas with A in registers in flight across iterations, and the next
    iteration overwrites those registers. This use of acc makes it wait; the assembly is empty."""
    if not INTERP:
        acc = tl.inline_asm_elementwise("// keep", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def _tokens(x_base, live, column, KX, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """[BM, BK] of the tokens, starting with `column`; zero if not live, or beyond the last column."""
    offs_k = tl.arange(0, BK)
    inside = live[:, None]
    if not EVEN_K:
        inside = inside & (column + offs_k < KX)[None, :]
    return tl.load(x_base + column + offs_k[None, :], mask=inside, other=0.0)


@triton.jit
def _half_tokens(x_base, live, column, KX, BYTES: tl.constexpr, AT: tl.constexpr, EVEN_K: tl.constexpr):
    """[BM, BYTES] of the tokens: of each 32 columns from `column` on, the 16 from AT on."""
    byte = tl.arange(0, BYTES)
    columns = column + byte // 16 * 32 + byte % 16 + AT
    inside = live[:, None]
    if not EVEN_K:
        inside = inside & (columns < KX)[None, :]
    return tl.load(x_base + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _halves_of_bytes(w):
    """The codes in the low and in the high halves of bytes (int8), 16 times as large."""
    byte = w.to(tl.int32)
    return (byte << 4).to(tl.int8), (byte & 0xF0).to(tl.int8)


@triton.jit
def _from_e4m3(codes, DTYPE: tl.constexpr):
    """E4M3 codes (uint8, or FP8 on GPUs that have it) in `DTYPE`, exactly."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        # As fp16, the fields of a code stand for 2**-8 times its value.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        numbers = tl.where((codes & 0x7F) == 0x7F, float("nan"), half).to(DTYPE)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@triton.jit
def _row_product(
    X, XS, W, S, x_rows, live, expert, rows, inside, pid_k, N, KX, NX,
    FORMAT: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """[BN, BM] fp32: `rows` of the expert's matrix [N, KX], where `inside`, times the tokens `x_rows` of X.

    If N is more than NX, rows from NX on are the ups of gated experts, with scales of their own.
    """
    CODED: tl.constexpr = FORMAT == "fp8" and TOKENS != "a16"
    PAIRS: tl.constexpr = FORMAT == "s4"
    BYTES: tl.constexpr = BK // 2 if PAIRS else BK
    STEPWISE: tl.constexpr = CODED or SCALE == "block"
    HALF: tl.constexpr = X.dtype.element_ty if TOKENS == "a16" else tl.float16
    rows = tl.where(inside, rows, 0)  # surplus rows read the first; the store masks them
    up = (rows >= NX).to(tl.int32)
    row_size = KX // 2 if PAIRS else KX
    w_rows = W + expert.to(tl.int64) * N * row_size + rows.to(tl.int64)[:, None] * row_size
    x_base = X + x_rows.to(tl.int64)[:, None] * KX
    blocks = tl.cdiv(KX, 128)
    if SCALE == "block":
        high = tl.cdiv(NX, 128)
        scale_row = up * high + (rows - up * NX) // 128
        s_base = S + (expert.to(tl.int64) * (high * (N // NX)) + scale_row) * blocks
    if TOKENS == "block":
        xs_base = XS + x_rows.to(tl.int64) * blocks
    acc = tl.zeros((BN, BM), dtype=tl.int32 if FORMAT == "s8" else tl.float32)
    steps = tl.cdiv(KX, BK)
    first = (steps * pid_k) // SPLIT_K
    last = (steps * (pid_k + 1)) // SPLIT_K
    for step in tl.range(first, last, num_stages=STAGES):
        column = step * BK
        offs_k = step * BYTES + tl.arange(0, BYTES)
        if EVEN_K:
            w = tl.load(w_rows + offs_k[None, :])
        else:
            w = tl.load(
                w_rows + offs_k[None, :], mask=(offs_k < row_size)[None, :] & (rows >= 0)[:, None], other=0.0
            )
        if not PAIRS:
            x = _tokens(x_base, live, column, KX, BK, EVEN_K)
        if CODED:
            if w.dtype == tl.uint8:
                w = _from_e4m3(w, HALF)
                x = _from_e4m3(x, HALF)
        elif FORMAT == "fp8":
            w = _from_e4m3(w, HALF)
        if PAIRS:
            low, high = _halves_of_bytes(w)
            x = _half_tokens(x_base, live, column, KX, BYTES, 0, EVEN_K)
            part = _dot(low, x, tl.zeros((BN, BM), dtype=tl.int32), INTERP)
            x = _half_tokens(x_base, live, column, KX, BYTES, 16, EVEN_K)
            part = _dot(high, x, part, INTERP)
            group = expert.to(tl.int64) * (KX // 128) + column // 128
            acc += part.to(tl.float32) * tl.load(S + group * N + rows).to(tl.float32)[:, None]
        elif STEPWISE:
            part = _dot(w, x, tl.zeros((BN, BM), dtype=tl.float32), INTERP)
            if SCALE == "block":
                part = part * tl.load(s_base + column // 128)[:, None]
            if TOKENS == "block":
                part = part * tl.load(xs_base + column // 128, mask=live, other=0.0)[None, :]
            acc += part
        else:
            acc = _dot(w, x, acc, INTERP)
            if FORMAT == "fp8":
                acc = _keep(acc, INTERP)
    acc = acc * 0.0625 if PAIRS else acc.to(tl.float32)
    if SCALE == "channel":
        acc = acc * tl.load(S + expert.to(tl.int64) * N + rows)[:, None]
    elif SCALE == "tensor":
        acc = acc * tl.load(S + expert * (N // NX) + up)[:, None]
    if TOKENS == "token":
        acc = acc * tl.load(XS + x_rows, mask=live, other=0.0)[None, :]
    elif TOKENS == "tensor":
        acc = acc * tl.load(XS)
    return acc
