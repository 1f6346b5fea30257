# mypy: ignore-errors
"""Device code that reads the layout ``marlin-int4`` in place: the product of a few tiles.

A Marlin tile is 16 columns by 64 rows in 512 bytes. Lane ``4 g + c`` of a warp owns 16 of these bytes, the A
operands of four 16x16 matrix instructions: word i holds rows ``16 i + g + 8 h`` and columns
``2 c + 8 k8 + b``, with the code of (h, k8, b) at bits ``16 b + 8 h + 4 k8``. The bytes therefore go from
memory to registers in one 16-byte load, and on to the tensor cores without shared memory; the product is
computed transposed, ``acc[rows, tokens]``.

Warps split the reduction of a tile of 64 rows in chunks of ``16 * DEPTH`` columns, and add their sums at the
end, so that the loop has no barrier. For this, the warps are the batch dimension of a batched product, of
which each warp keeps its part in its own registers. Rows g and rows g + 8 are separate products, as are the
two halves of 16 columns: otherwise operands would combine values of two words, which Triton would move
between threads.

Codes enter the products as ``BASE + u``, which takes a mask and an or. The surplus ``(BASE + zero) * sum(x)``
is subtracted by a product with a constant, once for all rows. Scales multiply the fp32 sum of their group.

`INTERP` selects code for Triton's interpreter, which has no inline assembly and computes bf16 products
incorrectly: the same products are then computed in fp32.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _raised_code(BASE):
    """Assembly of `_raised`: two half words in, four pairs of floats out."""
    magic = "0x43004300" if BASE == 128 else "0x64006400"
    lines = [f"lop3.b32 $0, $4, 0x000F000F, {magic}, 0xEA;"]
    for i in range(1, 4):
        lines += [f"shr.b32 t, $4, {4 * i};", f"lop3.b32 ${i}, t, 0x000F000F, {magic}, 0xEA;"]
    return "\n".join(["{", ".reg .b32 t;", *lines, "}"])


@triton.constexpr_function
def _raised_floats(BASE):
    return (tl.bfloat16 if BASE == 128 else tl.float16,) * 4


@triton.jit
def _raised(codes, BASE: tl.constexpr, INTERP: tl.constexpr):
    """``BASE + u`` for the four codes of 16-bit words [...], in the order (h, k8).

    BASE is 128 for bf16 and 1024 for fp16. There the unit in the last place is 1, so that the sum is
    ``BASE | u``.
    """
    if INTERP:
        q = codes.to(tl.uint16, bitcast=True).to(tl.uint32)
        r0 = (q & 15).to(tl.float32) + BASE
        r1 = ((q >> 4) & 15).to(tl.float32) + BASE
        r2 = ((q >> 8) & 15).to(tl.float32) + BASE
        r3 = (q >> 12).to(tl.float32) + BASE
    else:
        CODE: tl.constexpr = _raised_code(BASE)
        FLOATS: tl.constexpr = _raised_floats(BASE)
        r0, r1, r2, r3 = tl.inline_asm_elementwise(
            CODE, "=&r,=&r,=&r,=&r,r", args=[codes], dtype=FLOATS, is_pure=True, pack=2
        )
    return r0, r1, r2, r3


@triton.jit
def _by_element(rows, BM: tl.constexpr, G: tl.constexpr, W: tl.constexpr):
    """Broadcasts per-row values [c, g, W, G, i] to [G * W, 32, BM], in the layout of a product."""
    v = tl.reshape(tl.permute(rows, (3, 2, 4, 1, 0)), (G * W, 32, 1, 4, 1))
    return tl.reshape(tl.broadcast_to(v, (G * W, 32, BM // 8, 4, 2)), (G * W, 32, BM))


@triton.jit
def _raised_zeros(words, BIT: tl.constexpr, BASE: tl.constexpr):
    """``BASE + zero`` fp32 [..., i] from words [...] of eight zero points, number i at bits BIT + 4 i."""
    i = tl.arange(0, 4)[None, None, None, None, :]
    z = (words.to(tl.uint32, bitcast=True)[:, :, :, :, None] >> (i * 4 + BIT)) & 15
    z = ((z << 16) | 0x43000000) if BASE == 128 else ((z << 13) | 0x44800000)
    return z.to(tl.float32, bitcast=True)


@triton.jit
def _operand_a(q, W: tl.constexpr, G: tl.constexpr, KG: tl.constexpr):
    """[G * W, 32, 8 * KG] from axes (W, G, KG, g, c, i, b)."""
    return tl.reshape(tl.permute(q, (1, 0, 5, 3, 2, 4, 6)), (G * W, 32, 8 * KG))


@triton.jit
def _operand_b(x, W: tl.constexpr, G: tl.constexpr, KG: tl.constexpr, BM: tl.constexpr):
    """[G * W, 8 * KG, BM] from axes (c, token, W, G, KG, BM/8, b)."""
    return tl.reshape(tl.permute(x, (3, 2, 4, 0, 6, 5, 1)), (G * W, 8 * KG, BM))


@triton.jit
def _group_sums(
    codes, scales, zeros, x0, x1, BASE: tl.constexpr, ZEROS: tl.constexpr, SCALED: tl.constexpr,
    G: tl.constexpr, KG: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """The warps' chunk of the product, by group: [G * W, 32, BM] fp32 for rows g and for rows g + 8.

    x0 and x1 are the tokens' columns with k8 = 0 and 1: each matrix instruction takes half of two tiles.
    """
    h0k0, h0k1, h1k0, h1k1 = _raised(tl.reshape(codes, (W, G, KG, 8, 4, 4, 2)), BASE, INTERP)
    b0 = _operand_b(x0, W, G, KG, BM)
    b1 = _operand_b(x1, W, G, KG, BM)
    if INTERP:
        b0 = b0.to(tl.float32)
        b1 = b1.to(tl.float32)
    ones = tl.full((G * W, 16, 8 * KG), 1.0 if ZEROS else -8.0 - BASE, dtype=b0.dtype)
    total = tl.reshape(tl.dot(ones, b1, tl.dot(ones, b0)), (G * W, 1, 16, BM))
    total = tl.reshape(tl.broadcast_to(total, (G * W, 2, 16, BM)), (G * W, 32, BM))
    start = tl.zeros((G * W, 32, BM), dtype=tl.float32) if ZEROS else total
    low = tl.dot(_operand_a(h0k1, W, G, KG), b1, tl.dot(_operand_a(h0k0, W, G, KG), b0, start))
    high = tl.dot(_operand_a(h1k1, W, G, KG), b1, tl.dot(_operand_a(h1k0, W, G, KG), b0, start))
    if ZEROS:
        low -= total * _by_element(_raised_zeros(zeros, 0, BASE), BM, G, W)
        high -= total * _by_element(_raised_zeros(zeros, 16, BASE), BM, G, W)
    if SCALED:
        s0, s1 = tl.split(tl.reshape(scales, (4, 8, W, G, 4, 2)))
        low = low * _by_element(s0.to(tl.float32), BM, G, W)
        high = high * _by_element(s1.to(tl.float32), BM, G, W)
    return low, high


@triton.jit
def _added(acc, part, G: tl.constexpr):
    """acc [W, 32, BM] plus the G groups of part [G * W, 32, BM]."""
    W: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[2]
    if G == 2:
        # Written out: with tl.sum the multiplications by the scales would not be fused into the additions.
        first, second = tl.split(tl.permute(tl.reshape(part, (2, W, 32, BM)), (1, 2, 3, 0)))
        acc = acc + first + second
    elif G > 2:
        acc += tl.sum(tl.reshape(part, (G, W, 32, BM)), 0)
    else:
        acc += part
    return acc


@triton.jit
def _product(
    X, W, S, Z, x_rows, live, expert, first, stride, N, K, KX, BASE: tl.constexpr, ZEROS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, DEPTH: tl.constexpr, V: tl.constexpr, KW: tl.constexpr,
    EVEN: tl.constexpr, WAIT: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """[V, 4 i, 8 g, BM] fp32 for rows ``16 i + g``, and for ``16 i + g + 8``, of V tiles of 64 rows.

    The tiles are `first` and every `stride`-th tile after it; the KW warps of a tile split the reduction.
    DEPTH is the number of 16-column tiles that a warp takes at a time, GROUP the columns per scale, 0 for one
    scale per row. EVEN says that DEPTH * KW divides the reduction and tokens are as wide. With WAIT, waits
    for the tokens.

    The first axes of loaded tensors are a warp's lanes, then the warps. Triton distributes them to threads in
    this order, so that loaded values are where the products need them.
    """
    SCALED: tl.constexpr = GROUP > 0
    G: tl.constexpr = 16 * DEPTH // GROUP if (SCALED and GROUP < 16 * DEPTH) else 1
    KG: tl.constexpr = DEPTH // G
    RUN: tl.constexpr = GROUP // 16 if SCALED else 1
    NW: tl.constexpr = V * KW
    tiles = K // 16
    runs = K // GROUP if SCALED else 1
    warp = tl.arange(0, NW)
    share = (warp % KW) * DEPTH
    tile = tl.minimum(first + (warp // KW) * stride, N // 64 - 1)

    kt = share[:, None, None] + tl.arange(0, DEPTH)[None, :, None]
    w_at = kt * (N * 4) + tile[:, None, None] * 256 + tl.arange(0, 256)[None, None, :]
    w_ptr = W + expert.to(tl.int64) * tiles * (N * 4) + w_at

    # Scales and zero points: axes (c, g, W, G).
    group = share[None, None, :, None] + (tl.arange(0, G) * KG)[None, None, None, :]
    lanes = tile[None, None, :, None] * 8 + tl.arange(0, 8)[None, :, None, None]
    lanes = lanes + tl.zeros((4, 1, 1, 1), dtype=tl.int32)
    eight = tl.arange(0, 8)[None, None, None, None, :]
    s_base = S + expert.to(tl.int64) * runs * N
    z_base = Z + expert.to(tl.int64) * runs * (N // 8)

    # Tokens: axes (c, token, W, G, KG, BM/8, b).
    x_at = (tl.arange(0, 4) * 2)[:, None, None, None, None, None, None]
    x_at += (share * 16)[None, None, :, None, None, None, None]
    x_at += (tl.arange(0, G) * (KG * 16))[None, None, None, :, None, None, None]
    x_at += (tl.arange(0, KG) * 16)[None, None, None, None, :, None, None]
    x_at += tl.arange(0, 2)[None, None, None, None, None, None, :]
    x_row = tl.permute(tl.reshape(x_rows.to(tl.int64), (BM // 8, 8)), (1, 0)) * KX
    x_live = tl.permute(tl.reshape(live, (BM // 8, 8)), (1, 0))
    x_ptr = X + x_row[None, :, None, None, None, :, None] + x_at
    x_live = x_live[None, :, None, None, None, :, None]

    low = tl.zeros((NW, 32, BM), dtype=tl.float32)
    high = tl.zeros((NW, 32, BM), dtype=tl.float32)
    s = tl.zeros((4, 8, NW, G, 8), dtype=S.dtype.element_ty)
    z = tl.zeros((4, 8, NW, G), dtype=tl.int32)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    for step in tl.range(0, tl.cdiv(tiles, DEPTH * KW), num_stages=1):
        at = step * (DEPTH * KW)
        # Beyond the end tokens are zero; weights need not be, since any bits of a code are a finite number.
        w = tl.load(w_ptr + at * (N * 4), mask=None if EVEN else kt + at < tiles, cache_modifier=".cg")
        run = (group + at) // RUN if SCALED else group * 0
        in_run = None if EVEN else run < runs
        if SCALED:
            s_ptr = s_base + (run * N + lanes * 8)[:, :, :, :, None] + eight
            s = tl.load(s_ptr) if EVEN else tl.load(s_ptr, mask=in_run[:, :, :, :, None], other=0.0)
        if ZEROS:
            z_ptr = z_base + run * (N // 8) + lanes
            z = tl.load(z_ptr) if EVEN else tl.load(z_ptr, mask=in_run, other=0)
        in_x0 = x_live if EVEN else x_live & (x_at + at * 16 < KX)
        in_x1 = x_live if EVEN else x_live & (x_at + at * 16 + 8 < KX)
        x0 = tl.load(x_ptr + at * 16, mask=in_x0, other=0.0)
        x1 = tl.load(x_ptr + at * 16 + 8, mask=in_x1, other=0.0)
        a, b = _group_sums(w, s, z, x0, x1, BASE, ZEROS, SCALED, G, KG, NW, BM, INTERP)
        low = _added(low, a, G)
        high = _added(high, b, G)
    low = tl.sum(tl.reshape(low, (V, KW, 4, 8, BM)), 1)
    high = tl.sum(tl.reshape(high, (V, KW, 4, 8, BM)), 1)
    return low, high
