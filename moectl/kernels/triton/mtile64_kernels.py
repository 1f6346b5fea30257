# mypy: ignore-errors
"""Device code that reads the layout ``moectl-mtile64``: dequantization and the product of one tile.

A weight tile is 64 rows x 64 columns of 4-bit codes in 2048 bytes. Each of 4 warps owns 16 rows; lane
``4 g + c`` holds rows g and g + 8 and the columns ``16 j + {2c, 2c+1, 2c+8, 2c+9}``, j = 0..3: the A
operand of four 16-deep matrix instructions, in one 16-byte load. The product is therefore computed
transposed, ``acc[rows, tokens]``. Rows of the first GEMM come as 8 gates and 8 ups in each block of 16,
so that both halves of an activation are in one thread's accumulator.

``N, K`` are the stored (padded) sizes of the weight matrix, ``KX`` its logical columns.

`INTERP` selects code for Triton's interpreter, which has no inline assembly and multiplies bf16 wrongly:
the same values are then computed in fp32.
"""

import triton
import triton.language as tl


@triton.jit
def _round_bf16(v, INTERP: tl.constexpr):
    """`v` rounded to the nearest bf16. Hardware rounds so when it converts; the interpreter truncates."""
    if INTERP:
        u = v.to(tl.uint32, bitcast=True)
        u = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
        v = u.to(tl.float32, bitcast=True)
    return v


@triton.jit
def _mxfp4_scales(words, NB: tl.constexpr, KB: tl.constexpr, INTERP: tl.constexpr):
    """Scales of rows g and rows g + 8, each [NB, KB, 4, 8, 2 groups], from words of four E8M0 bytes.

    A byte s means 2^(s - 127): the exponent field of bf16, except s = 0, whose value is subnormal
    (0x0040). On hardware the result is a pair of equal bf16 in an int32.
    """
    s = tl.reshape(words, (NB, KB, 4, 8))
    if INTERP:
        u = s.to(tl.uint32, bitcast=True)
        a0 = tl.maximum((u & 255) << 23, 0x00400000).to(tl.float32, bitcast=True)
        a1 = tl.maximum(((u >> 8) & 255) << 23, 0x00400000).to(tl.float32, bitcast=True)
        b0 = tl.maximum(((u >> 16) & 255) << 23, 0x00400000).to(tl.float32, bitcast=True)
        b1 = tl.maximum((u >> 24) << 23, 0x00400000).to(tl.float32, bitcast=True)
    else:
        a0, a1, b0, b1 = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $4, 0, 0x4040;
            prmt.b32 $1, $4, 0, 0x4141;
            prmt.b32 $2, $4, 0, 0x4242;
            prmt.b32 $3, $4, 0, 0x4343;
            shl.b32 $0, $0, 7;
            shl.b32 $1, $1, 7;
            shl.b32 $2, $2, 7;
            shl.b32 $3, $3, 7;
            max.u32 $0, $0, 0x00400040;
            max.u32 $1, $1, 0x00400040;
            max.u32 $2, $2, 0x00400040;
            max.u32 $3, $3, 0x00400040;
            }""",
            "=&r,=&r,=&r,=&r,r",
            args=[s],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return tl.join(a0, a1), tl.join(b0, b1)


@triton.jit
def _int4_scales(
    words, GROUP: tl.constexpr, NB: tl.constexpr, KB: tl.constexpr, SK: tl.constexpr, INTERP: tl.constexpr
):
    """Scales of rows g and rows g + 8, each [NB, KB, 4, 8, 2], from words of two bf16.

    With group 32 a word holds the two groups of one row, with larger groups the scales of both rows.
    """
    s = tl.reshape(words, (NB, KB, 4, 8, 2)) if GROUP == 32 else tl.reshape(words, (NB, SK, 4, 8))
    if INTERP:
        u = s.to(tl.uint32, bitcast=True)
        lo = (u << 16).to(tl.float32, bitcast=True)
        hi = (u & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        lo, hi = tl.inline_asm_elementwise(
            "{ prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232; }",
            "=&r,=&r,r",
            args=[s],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    if GROUP == 32:
        s0, s1 = tl.split(tl.permute(tl.join(lo, hi), (0, 1, 2, 3, 5, 4)))
    else:
        KR: tl.constexpr = KB // SK
        s0 = tl.broadcast_to(tl.reshape(lo, (NB, SK, 1, 4, 8, 1)), (NB, SK, KR, 4, 8, 2))
        s1 = tl.broadcast_to(tl.reshape(hi, (NB, SK, 1, 4, 8, 1)), (NB, SK, KR, 4, 8, 2))
        s0 = tl.reshape(s0, (NB, KB, 4, 8, 2))
        s1 = tl.reshape(s1, (NB, KB, 4, 8, 2))
    return s0, s1


@triton.jit
def _spread(s, NB: tl.constexpr, KB: tl.constexpr):
    """[NB, KB, 4, 8, 2 groups] scales repeated over the code bytes, [NB, KB, 4, 8, 4, 4, 2, 2]."""
    s = tl.reshape(s, (NB, KB, 4, 8, 1, 2, 1, 1, 1))
    s = tl.broadcast_to(s, (NB, KB, 4, 8, 4, 2, 2, 2, 2))
    return tl.reshape(s, (NB, KB, 4, 8, 4, 4, 2, 2))


@triton.jit
def _decode_interpreted(codes, s0, s1, FORMAT: tl.constexpr):
    """`_decode` in fp32 and ordinary operations, bit for bit."""
    b = codes.to(tl.uint32)
    lo, hi = tl.split(b)
    b0, b2 = tl.split(lo)
    b1, b3 = tl.split(hi)
    x = b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)
    if FORMAT == "mxfp4":
        r0 = x & 0x81C081C0
        r1 = ((x >> 4) | (x << 28)) & 0x81C081C0
        r2 = (x << 6) & 0x81C081C0
        r3 = (((x >> 6) | (x << 26)) & 0x81808180) | ((x << 2) & 0x00400040)
    else:
        r0 = (x & 0x000F000F) | 0x43004300
        r1 = ((x >> 4) & 0x000F000F) | 0x43004300
        r2 = ((x >> 8) & 0x000F000F) | 0x43004300
        r3 = ((x >> 12) & 0x000F000F) | 0x43004300
    low = tl.join(tl.join(r0 << 16, r1 << 16), tl.join(r0 & 0xFFFF0000, r1 & 0xFFFF0000))
    high = tl.join(tl.join(r2 << 16, r3 << 16), tl.join(r2 & 0xFFFF0000, r3 & 0xFFFF0000))
    v = tl.join(low, high).to(tl.float32, bitcast=True)
    v = v * 8.507059173023462e37 if FORMAT == "mxfp4" else v - 136.0
    t0, _ = tl.split(s0)
    t0, _ = tl.split(t0)
    t1, _ = tl.split(s1)
    t1, _ = tl.split(t1)
    s = tl.join(t0, t1)
    n: tl.constexpr = s.shape
    s = tl.broadcast_to(tl.reshape(s, (n[0], n[1], n[2], n[3], n[4], n[5], 2, 1, 1)), v.shape)
    return _round_bf16(v * s, True)


@triton.jit
def _decode(codes, s0, s1, FORMAT: tl.constexpr, INTERP: tl.constexpr):
    """Scaled bf16 weights [NB, KB, warp, g, c, j, h, kb0, k8] from code bytes [NB, KB, warp, g, c, j, 2, 2].

    MXFP4: a code's sign, exponent and mantissa bits are moved to bits 15, 8:7 and 6 of a bf16, which
    then is value * 2^-126 (subnormal for 0.5); times 2^126 is exact, times the scale is exact or
    overflows exactly where the value does. One product with 2^(s - 1) would overflow for scales above 2.
    INT4: 0x4300 | u is 128 + u, and minus 136 is u - 8. ``fma(a, b, -0)`` is a product that keeps the
    sign of zero and exists from sm_80 on.
    """
    if INTERP:
        return _decode_interpreted(codes, s0, s1, FORMAT)
    if FORMAT == "mxfp4":
        r0, r1 = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, up, zero;
            mov.b32 up, 0x7E807E80;
            mov.b32 zero, 0x80008000;
            and.b32 $0, $4, 0x81C081C0;
            shf.r.wrap.b32 t, $4, $4, 4;
            and.b32 $1, t, 0x81C081C0;
            shl.b32 t, $4, 6;
            and.b32 $2, t, 0x81C081C0;
            shf.r.wrap.b32 t, $4, $4, 6;
            and.b32 u, t, 0x81808180;
            shl.b32 t, $4, 2;
            lop3.b32 $3, t, 0x00400040, u, 0xEA;
            fma.rn.bf16x2 $0, $0, up, zero;
            fma.rn.bf16x2 $1, $1, up, zero;
            fma.rn.bf16x2 $2, $2, up, zero;
            fma.rn.bf16x2 $3, $3, up, zero;
            fma.rn.bf16x2 $0, $0, $5, zero;
            fma.rn.bf16x2 $1, $1, $9, zero;
            fma.rn.bf16x2 $2, $2, $5, zero;
            fma.rn.bf16x2 $3, $3, $9, zero;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            args=[codes, s0, s1],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return tl.join(r0, r1)
    r0, r1 = tl.inline_asm_elementwise(
        """{
            .reg .b32 t, one, off, zero;
            mov.b32 one, 0x3F803F80;
            mov.b32 off, 0xC308C308;
            mov.b32 zero, 0x80008000;
            lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
            shr.b32 t, $4, 4;
            lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
            shr.b32 t, $4, 8;
            lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
            shr.b32 t, $4, 12;
            lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, $0, one, off;
            fma.rn.bf16x2 $1, $1, one, off;
            fma.rn.bf16x2 $2, $2, one, off;
            fma.rn.bf16x2 $3, $3, one, off;
            fma.rn.bf16x2 $0, $0, $5, zero;
            fma.rn.bf16x2 $1, $1, $9, zero;
            fma.rn.bf16x2 $2, $2, $5, zero;
            fma.rn.bf16x2 $3, $3, $9, zero;
            }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        args=[codes, s0, s1],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return tl.join(r0, r1)


@triton.jit
def _dequantized(
    codes,
    scales,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SK: tl.constexpr,
    INTERP: tl.constexpr,
):
    """[BN, BK] weights from loaded code bytes [NB, KB, 2048] and scale words [NB, SK, words]."""
    NB: tl.constexpr = BN // 64
    KB: tl.constexpr = BK // 64
    if FORMAT == "mxfp4":
        s0, s1 = _mxfp4_scales(scales, NB, KB, INTERP)
    else:
        s0, s1 = _int4_scales(scales, GROUP, NB, KB, SK, INTERP)
    codes = tl.reshape(codes, (NB, KB, 4, 8, 4, 4, 2, 2))
    v = _decode(codes, _spread(s0, NB, KB), _spread(s1, NB, KB), FORMAT, INTERP)
    # [nb kb warp g c j h kb0 k8] -> rows (nb warp h g), columns (kb j k8 c kb0)
    return tl.reshape(tl.permute(v, (0, 2, 6, 3, 1, 5, 8, 4, 7)), (BN, BK))


@triton.jit
def _product(
    X,
    W,
    S,
    x_rows,
    live,
    expert,
    pid_n,
    pid_k,
    N,
    K,
    KX,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERP: tl.constexpr,
):
    """[BN, BM] fp32: rows of the expert's weight tile times the tokens `x_rows` of X, over one K split."""
    NB: tl.constexpr = BN // 64
    KB: tl.constexpr = BK // 64
    SPAN: tl.constexpr = 64 if GROUP == 32 else GROUP  # columns that one run of scale words covers
    WORDS: tl.constexpr = 64 if (FORMAT == "int4" and GROUP == 32) else 32
    SK: tl.constexpr = BK // SPAN if BK >= SPAN else 1
    tiles = K // 64
    spans = K // SPAN
    nb = pid_n * NB + tl.arange(0, NB)
    if not EVEN_N:
        nb = tl.minimum(nb, N // 64 - 1)  # surplus rows read the last tile, and the store drops them
    kb = tl.arange(0, KB)
    ks = tl.arange(0, SK)
    offs_w = nb[:, None, None] * (tiles * 2048) + kb[None, :, None] * 2048 + tl.arange(0, 2048)[None, None, :]
    offs_s = (
        nb[:, None, None] * (spans * WORDS) + ks[None, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    )
    w_base = W + expert.to(tl.int64) * (N // 64) * tiles * 2048
    s_base = S + expert.to(tl.int64) * (N // 64) * spans * WORDS
    offs_k = tl.arange(0, BK)
    x_ptr = X + x_rows.to(tl.int64)[:, None] * KX + offs_k[None, :]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    steps = tl.cdiv(K, BK)
    first = (steps * pid_k) // SPLIT_K
    last = (steps * (pid_k + 1)) // SPLIT_K
    for step in tl.range(first, last, num_stages=STAGES):
        span = (step * BK) // SPAN
        if EVEN_K:
            w = tl.load(w_base + step * (KB * 2048) + offs_w, cache_modifier=".cg")
            s = tl.load(s_base + span * WORDS + offs_s)
            x = tl.load(x_ptr + step * BK, mask=live[:, None], other=0.0)
        else:
            in_w = (step * KB + kb < tiles)[None, :, None] & (offs_w >= 0)
            in_s = (span + ks < spans)[None, :, None] & (offs_s >= 0)
            w = tl.load(w_base + step * (KB * 2048) + offs_w, mask=in_w, other=0)
            s = tl.load(s_base + span * WORDS + offs_s, mask=in_s, other=0)
            x = tl.load(x_ptr + step * BK, mask=live[:, None] & (step * BK + offs_k < KX)[None, :], other=0.0)
        a = _dequantized(w, s, FORMAT, GROUP, BN, BK, SK, INTERP)
        if INTERP:
            acc += tl.dot(a, tl.trans(x.to(tl.float32)))
        else:
            acc = tl.dot(a, tl.trans(x), acc)
            # Triton 3.6 leaves wgmmas with A in registers in flight over the loop edge, and the next
            # iteration overwrites those registers. A use of acc makes it wait; the assembly is empty.
            acc = tl.inline_asm_elementwise("// keep", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc
