# mypy: ignore-errors
"""Device code of the fused-MoE kernels on the layout ``moectl-mtile64``.

A weight tile is 64 rows x 64 columns of 4-bit codes in 2048 bytes. Each of 4 warps owns 16 rows; lane
``4 g + c`` holds rows g and g + 8 and the columns ``16 j + {2c, 2c+1, 2c+8, 2c+9}``, j = 0..3: the A
operand of four 16-deep matrix instructions, in one 16-byte load. The product is therefore computed
transposed, ``acc[rows, tokens]``. Rows of the first GEMM come as 8 gates and 8 ups in each block of 16,
so that both halves of an activation are in one thread's accumulator.

Names used throughout: `ids` and `weights` are flat, one entry per assignment (token, choice); a *slot* is
an index into them. ``N, K`` are the stored (padded) sizes of the weight matrix, ``NX`` its logical rows or
columns of output, ``KX`` its logical columns.

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
        r1 = (x << 3) & 0x81C081C0
        r2 = (x << 6) & 0x81C081C0
        r3 = ((x << 1) & 0x80008000) | ((x >> 3) & 0x01800180) | ((x >> 7) & 0x00400040)
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
            shl.b32 t, $4, 3;
            and.b32 $1, t, 0x81C081C0;
            shl.b32 t, $4, 6;
            and.b32 $2, t, 0x81C081C0;
            shl.b32 t, $4, 1;
            and.b32 u, t, 0x80008000;
            shr.b32 t, $4, 3;
            lop3.b32 u, t, 0x01800180, u, 0xEA;
            shr.b32 t, $4, 7;
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


@triton.jit
def _gemm1_tile(
    X, W, S, B, H, WEIGHTS, slots, h_rows, live, expert, pid_n, N, K, KX, NX, alpha, limit,
    TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """H[h_rows] = activation of (first GEMM of the tokens of `slots`); NX is the intermediate size."""
    acc = _product(
        X, W, S, slots // TOP_K, live, expert, pid_n, 0, N, K, KX,
        FORMAT, GROUP, BM, BN, BK, 1, STAGES, EVEN_N, EVEN_K, INTERP,
    )  # fmt: skip
    if WEIGHTED:
        acc = acc * tl.load(WEIGHTS + slots, mask=live, other=0.0)[None, :]
    if BIAS:
        rows = pid_n * BN + tl.arange(0, BN)
        b = tl.load(B + expert.to(tl.int64) * N + rows, mask=rows < N, other=0.0)
        acc += b.to(tl.float32)[:, None]
    pairs = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    gate = tl.reshape(gate, (BN // 2, BM))
    up = tl.reshape(up, (BN // 2, BM))
    gate = tl.where(gate > limit, limit, gate)  # unlike a minimum, keeps NaN
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    if ACT == "swigluoai":
        up += 1.0
    h = up * gate / (1.0 + tl.exp(-alpha * gate))
    columns = pid_n * (BN // 2) + tl.arange(0, BN // 2)
    h_ptr = H + h_rows.to(tl.int64)[:, None] * NX + columns[None, :]
    h = _round_bf16(tl.trans(h), INTERP).to(H.dtype.element_ty)
    tl.store(h_ptr, h, mask=live[:, None] & (columns < NX)[None, :])


@triton.jit
def _gemm2_tile(
    H, W, S, B, Y, WEIGHTS, slots, h_rows, live, expert, pid_n, pid_k, N, K, KX, NX,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    """Y[slots] = weight * (second GEMM of H[h_rows]), or one K split's part of it; NX is the hidden size."""
    acc = _product(
        H, W, S, h_rows, live, expert, pid_n, pid_k, N, K, KX,
        FORMAT, GROUP, BM, BN, BK, SPLIT_K, STAGES, EVEN_N, EVEN_K, INTERP,
    )  # fmt: skip
    rows = pid_n * BN + tl.arange(0, BN)
    if BIAS:
        once = pid_k == 0
        b = tl.load(B + expert.to(tl.int64) * N + rows, mask=(rows < N) & once, other=0.0)
        acc += b.to(tl.float32)[:, None]
    if WEIGHTED:
        acc = acc * tl.load(WEIGHTS + slots, mask=live, other=0.0)[None, :]
    y = tl.trans(acc)
    if Y.dtype.element_ty == tl.bfloat16:
        y = _round_bf16(y, INTERP)
    y_ptr = Y + slots.to(tl.int64)[:, None] * NX + rows[None, :]
    tl.store(y_ptr, y.to(Y.dtype.element_ty), mask=live[:, None] & (rows < NX)[None, :])


@triton.jit
def _assigned(IDS, T, p, m0, E: tl.constexpr, BY_SLOT: tl.constexpr, TPAD: tl.constexpr, BM: tl.constexpr):
    """Expert of program p with its assignments m0..m0+BM: (expert, slots [BM], live [BM], any).

    With `BY_SLOT` program p belongs to assignment p and works when that is the first one of its
    expert; otherwise it belongs to expert p. Reading all ids in every program replaces a sort.
    """
    t = tl.arange(0, TPAD)
    ids = tl.load(IDS + t, mask=t < T, other=-1)
    if BY_SLOT:
        expert = tl.load(IDS + p)
        earlier = tl.sum(((ids == expert) & (t < p)).to(tl.int32), 0)
        mine = (expert >= 0) & (expert < E) & (earlier == 0)
    else:
        expert = p
        mine = p < E
    match = (ids == expert) & (t < T)
    count = tl.sum(match.to(tl.int32), 0)
    rank = tl.cumsum(match.to(tl.int32), 0) - 1
    wanted = m0 + tl.arange(0, BM)
    chosen = match[:, None] & (rank[:, None] == wanted[None, :])
    slots = tl.sum(tl.where(chosen, t[:, None], 0), 0)
    return expert, slots, wanted < count, mine & (count > m0)


@triton.jit(do_not_specialize=["T"])
def _decode_gemm1_kernel(
    X, W, S, B, H, IDS, WEIGHTS, T, N, K, KX, NX, alpha, limit,
    E: tl.constexpr, BY_SLOT: tl.constexpr, TPAD: tl.constexpr, M_BLOCKS: tl.constexpr,
    TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """H ``[T, NX]`` by slot; grid (row tiles, programs * M_BLOCKS), routing resolved inside."""
    pid_n = tl.program_id(0)
    p = tl.program_id(1) // M_BLOCKS
    m0 = (tl.program_id(1) % M_BLOCKS) * BM
    expert, slots, live, work = _assigned(IDS, T, p, m0, E, BY_SLOT, TPAD, BM)
    if work:
        _gemm1_tile(
            X, W, S, B, H, WEIGHTS, slots, slots, live, expert, pid_n, N, K, KX, NX, alpha, limit,
            TOP_K, ACT, BIAS, WEIGHTED, FORMAT, GROUP, BM, BN, BK, STAGES, EVEN_N, EVEN_K, INTERP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _decode_gemm2_kernel(
    H, W, S, B, Y, IDS, WEIGHTS, T, N, K, KX, NX,
    E: tl.constexpr, BY_SLOT: tl.constexpr, TPAD: tl.constexpr, M_BLOCKS: tl.constexpr,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    """Y ``[SPLIT_K, T, NX]`` parts by slot; grid (row tiles, programs * M_BLOCKS, SPLIT_K)."""
    pid_n = tl.program_id(0)
    p = tl.program_id(1) // M_BLOCKS
    m0 = (tl.program_id(1) % M_BLOCKS) * BM
    pid_k = tl.program_id(2)
    expert, slots, live, work = _assigned(IDS, T, p, m0, E, BY_SLOT, TPAD, BM)
    if work:
        _gemm2_tile(
            H, W, S, B, Y + pid_k.to(tl.int64) * T * NX, WEIGHTS, slots, slots, live, expert, pid_n, pid_k,
            N, K, KX, NX, BIAS, WEIGHTED,
            FORMAT, GROUP, BM, BN, BK, SPLIT_K, STAGES, EVEN_N, EVEN_K, INTERP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _route_kernel(IDS, SORTED, OFFSETS, T, E: tl.constexpr, BT: tl.constexpr):
    """Slots sorted by expert, stable, and their offsets ``[E + 1]``; one program per expert, no atomics."""
    e = tl.program_id(0)
    below = tl.zeros((BT,), dtype=tl.int32)
    equal = tl.zeros((BT,), dtype=tl.int32)
    for t0 in range(0, T, BT):
        t = t0 + tl.arange(0, BT)
        ids = tl.load(IDS + t, mask=t < T, other=-1)
        below += ((ids < e) & (ids >= 0)).to(tl.int32)
        equal += (ids == e).to(tl.int32)
    base = tl.sum(below, 0)
    count = tl.sum(equal, 0)
    tl.store(OFFSETS + e, base)
    if e == E - 1:
        tl.store(OFFSETS + E, base + count)
    if count > 0:
        for t0 in range(0, T, BT):
            t = t0 + tl.arange(0, BT)
            ids = tl.load(IDS + t, mask=t < T, other=-1)
            match = (ids == e).to(tl.int32)
            tl.store(SORTED + base + tl.cumsum(match, 0) - 1, t, mask=ids == e)
            base += tl.sum(match, 0)


@triton.jit
def _scheduled(OFFSETS, pid, row_tiles, E: tl.constexpr, EPAD: tl.constexpr, BM: tl.constexpr):
    """Tile of program `pid`: (expert, row tile, first position, end position); expert E means none.

    Tiles run expert by expert, and within an expert row tile by row tile, so that neighbouring
    programs share weights. The grid is a bound that depends on the number of tokens only.
    """
    i = tl.arange(0, EPAD)
    lo = tl.load(OFFSETS + i, mask=i < E, other=0)
    hi = tl.load(OFFSETS + i + 1, mask=i < E, other=0)
    tiles = ((hi - lo + BM - 1) // BM) * row_tiles
    expert = tl.sum((tl.cumsum(tiles, 0) <= pid).to(tl.int32), 0)
    expert = tl.minimum(expert, E)
    before = tl.sum(tl.where(i < expert, tiles, 0), 0)
    start = tl.sum(tl.where(i == expert, lo, 0), 0)
    end = tl.sum(tl.where(i == expert, hi, 0), 0)
    m_tiles = tl.maximum((end - start + BM - 1) // BM, 1)
    r = pid - before
    return expert, r // m_tiles, start + (r % m_tiles) * BM, end


@triton.jit
def _grouped_gemm1_kernel(
    X, W, S, B, H, SORTED, OFFSETS, WEIGHTS, N, K, KX, NX, row_tiles, alpha, limit,
    E: tl.constexpr, EPAD: tl.constexpr, TAILS: tl.constexpr,
    TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """H ``[T, NX]`` in sorted order. A last tile of few tokens runs narrower: no padded columns."""
    expert, pid_n, m0, end = _scheduled(OFFSETS, tl.program_id(0), row_tiles, E, EPAD, BM)
    if expert < E:
        left = end - m0
        if (TAILS >= 2) & (left <= BM // 4):
            _grouped_gemm1_tile(
                X, W, S, B, H, SORTED, WEIGHTS, m0, end, expert, pid_n, N, K, KX, NX, alpha, limit,
                TOP_K, ACT, BIAS, WEIGHTED, FORMAT, GROUP, BM // 4 if TAILS >= 2 else BM, BN, BK,
                STAGES, EVEN_N, EVEN_K, INTERP,
            )  # fmt: skip
        elif (TAILS >= 1) & (left <= BM // 2):
            _grouped_gemm1_tile(
                X, W, S, B, H, SORTED, WEIGHTS, m0, end, expert, pid_n, N, K, KX, NX, alpha, limit,
                TOP_K, ACT, BIAS, WEIGHTED, FORMAT, GROUP, BM // 2 if TAILS >= 1 else BM, BN, BK,
                STAGES, EVEN_N, EVEN_K, INTERP,
            )  # fmt: skip
        else:
            _grouped_gemm1_tile(
                X, W, S, B, H, SORTED, WEIGHTS, m0, end, expert, pid_n, N, K, KX, NX, alpha, limit,
                TOP_K, ACT, BIAS, WEIGHTED, FORMAT, GROUP, BM, BN, BK, STAGES, EVEN_N, EVEN_K, INTERP,
            )  # fmt: skip


@triton.jit
def _grouped_gemm1_tile(
    X, W, S, B, H, SORTED, WEIGHTS, m0, end, expert, pid_n, N, K, KX, NX, alpha, limit,
    TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    positions = m0 + tl.arange(0, BM)
    live = positions < end
    slots = tl.load(SORTED + positions, mask=live, other=0)
    _gemm1_tile(
        X, W, S, B, H, WEIGHTS, slots, positions, live, expert, pid_n, N, K, KX, NX, alpha, limit,
        TOP_K, ACT, BIAS, WEIGHTED, FORMAT, GROUP, BM, BN, BK, STAGES, EVEN_N, EVEN_K, INTERP,
    )  # fmt: skip


@triton.jit
def _grouped_gemm2_kernel(
    H, W, S, B, Y, SORTED, OFFSETS, WEIGHTS, N, K, KX, NX, row_tiles,
    E: tl.constexpr, EPAD: tl.constexpr, TAILS: tl.constexpr,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Y ``[T, NX]`` by slot, from H in sorted order."""
    expert, pid_n, m0, end = _scheduled(OFFSETS, tl.program_id(0), row_tiles, E, EPAD, BM)
    if expert < E:
        left = end - m0
        if (TAILS >= 2) & (left <= BM // 4):
            _grouped_gemm2_tile(
                H, W, S, B, Y, SORTED, WEIGHTS, m0, end, expert, pid_n, N, K, KX, NX, BIAS, WEIGHTED,
                FORMAT, GROUP, BM // 4 if TAILS >= 2 else BM, BN, BK, STAGES, EVEN_N, EVEN_K, INTERP,
            )  # fmt: skip
        elif (TAILS >= 1) & (left <= BM // 2):
            _grouped_gemm2_tile(
                H, W, S, B, Y, SORTED, WEIGHTS, m0, end, expert, pid_n, N, K, KX, NX, BIAS, WEIGHTED,
                FORMAT, GROUP, BM // 2 if TAILS >= 1 else BM, BN, BK, STAGES, EVEN_N, EVEN_K, INTERP,
            )  # fmt: skip
        else:
            _grouped_gemm2_tile(
                H, W, S, B, Y, SORTED, WEIGHTS, m0, end, expert, pid_n, N, K, KX, NX, BIAS, WEIGHTED,
                FORMAT, GROUP, BM, BN, BK, STAGES, EVEN_N, EVEN_K, INTERP,
            )  # fmt: skip


@triton.jit
def _grouped_gemm2_tile(
    H, W, S, B, Y, SORTED, WEIGHTS, m0, end, expert, pid_n, N, K, KX, NX,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    positions = m0 + tl.arange(0, BM)
    live = positions < end
    slots = tl.load(SORTED + positions, mask=live, other=0)
    _gemm2_tile(
        H, W, S, B, Y, WEIGHTS, slots, positions, live, expert, pid_n, 0, N, K, KX, NX, BIAS, WEIGHTED,
        FORMAT, GROUP, BM, BN, BK, 1, STAGES, EVEN_N, EVEN_K, INTERP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _combine_kernel(
    Y, OUT, IDS, T, HIDDEN,
    E: tl.constexpr, TOP_K: tl.constexpr, SPLIT_K: tl.constexpr, BH: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """OUT ``[T / TOP_K, HIDDEN]``: the parts of a token's valid assignments, summed in a fixed order."""
    m = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    acc = tl.zeros((BH,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        slot = m * TOP_K + k
        expert = tl.load(IDS + slot)
        valid = (expert >= 0) & (expert < E)
        for part in tl.static_range(SPLIT_K):
            row = Y + (part * T.to(tl.int64) + slot) * HIDDEN
            acc += tl.load(row + h, mask=(h < HIDDEN) & valid, other=0.0).to(tl.float32)
    acc = _round_bf16(acc, INTERP)
    tl.store(OUT + m * HIDDEN + h, acc.to(OUT.dtype.element_ty), mask=h < HIDDEN)
