# mypy: ignore-errors
"""Device code that reads the layout ``moectl-mtile64``: dequantizes tiles of codes.

A weight tile is 64 rows x 64 columns. Each of 4 warps owns 16 rows; lane ``4 g + c`` holds rows g and
g + 8 and columns ``16 j + {2c, 2c+1, 2c+8, 2c+9}``, j = 0..3: the A operands of four matrix instructions of
depth 16, in one 16-byte load of 4-bit codes, or two of 8-bit codes.

`FORMAT` is mxfp4, nvfp4, mxfp8, int4 or int8; `GROUP` the columns per scale, -1 for one scale per row; `ZERO`
whether there are zero points; `SCALE` the type of the scales: e8m0, e4m3, bf16 or fp16; `DTYPE` the dtype of
the result. Blocks of NB x KB tiles have SK runs of scale words along their columns.

`INTERP` selects code for Triton's interpreter, which has no inline assembly and computes bf16 products
incorrectly: the same values are then computed in fp32.
"""

import triton
import triton.language as tl

from .mtile64_asm import DEQUANTIZATIONS, WIDE


@triton.constexpr_function
def _is_wide(FORMAT):
    """Whether codes have 8 bits."""
    return FORMAT in WIDE


@triton.jit
def _nearest(v, DTYPE: tl.constexpr, INTERP: tl.constexpr):
    """fp32 `v` before its conversion to `DTYPE`: rounded for the interpreter, which truncates to bf16."""
    if INTERP and tl.bfloat16 == DTYPE:
        u = v.to(tl.uint32, bitcast=True)
        u = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
        v = u.to(tl.float32, bitcast=True)
    return v


@triton.jit
def _halves(words, SCALE: tl.constexpr):
    """The two 16-bit floats of each int32, low then high, in fp32."""
    u = words.to(tl.uint32, bitcast=True)
    if SCALE == "bf16":
        lo = (u << 16).to(tl.float32, bitcast=True)
        hi = (u & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        lo = (u & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        hi = (u >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return lo, hi


@triton.jit
def _power_of_two(byte):
    """2^(byte - 127) in fp32 for an E8M0 byte: the byte is the exponent field; 0 gives a subnormal."""
    return tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _doubled(half):
    """A 16-bit pattern in both halves of an int32."""
    return half | (half << 16)


@triton.jit
def _by_row(lo, hi, GROUP: tl.constexpr, NB: tl.constexpr, KB: tl.constexpr, SK: tl.constexpr):
    """Values of rows g and of rows g + 8, each [NB, KB, 4, 8, 2 groups of 32], from the halves of words.

    With groups of 32, a word holds the two groups of a row; with larger groups, one value each of both rows.
    """
    if GROUP == 32:
        lo = tl.reshape(lo, (NB, KB, 4, 8, 2))
        hi = tl.reshape(hi, (NB, KB, 4, 8, 2))
        v0, v1 = tl.split(tl.permute(tl.join(lo, hi), (0, 1, 2, 3, 5, 4)))
    else:
        KR: tl.constexpr = KB // SK
        v0 = tl.broadcast_to(tl.reshape(lo, (NB, SK, 1, 4, 8, 1)), (NB, SK, KR, 4, 8, 2))
        v1 = tl.broadcast_to(tl.reshape(hi, (NB, SK, 1, 4, 8, 1)), (NB, SK, KR, 4, 8, 2))
        v0 = tl.reshape(v0, (NB, KB, 4, 8, 2))
        v1 = tl.reshape(v1, (NB, KB, 4, 8, 2))
    return v0, v1


@triton.jit
def _scale_bytes(words, NB: tl.constexpr, KB: tl.constexpr):
    """The four E8M0 bytes of each word: both groups of row g, then of row g + 8."""
    u = tl.reshape(words, (NB, KB, 4, 8)).to(tl.uint32, bitcast=True)
    return u & 255, (u >> 8) & 255, (u >> 16) & 255, u >> 24


@triton.jit
def _e4m3(bits):
    """fp32 values of E4M3 bits at an fp32's sign and at bits 20 to 26."""
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _e4m3_scales(words, NB: tl.constexpr, KB: tl.constexpr):
    """fp32 scales of rows g and of rows g + 8, each [NB, KB, 4, 8, 4 groups], of words of E4M3 pairs."""
    u = tl.reshape(words, (NB, KB, 4, 8, 2)).to(tl.uint32, bitcast=True)
    v = (u << 7) | (u >> 25)
    s0 = tl.join(_e4m3((u & 0x07F0) << 16), _e4m3((v & 0x07F0) << 16))
    s1 = tl.join(_e4m3(u & 0x07F00000), _e4m3(v & 0x07F00000))
    return tl.reshape(s0, (NB, KB, 4, 8, 4)), tl.reshape(s1, (NB, KB, 4, 8, 4))


@triton.jit
def _pair(v, DTYPE: tl.constexpr):
    """fp32 `v` in `DTYPE`, in both halves of an int32."""
    return _doubled(v.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def _scales(
    words, GROUP: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr, NB: tl.constexpr, KB: tl.constexpr,
    SK: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Scales of rows g and of rows g + 8, each [NB, KB, 4, 8, groups]: pairs of equal halves; INTERP: fp32.

    There are two groups of 32 columns, for E4M3 four of 16.

    An E8M0 byte s is 2^(s - 127): the exponent field of bf16, except s = 0, which is subnormal (0x0040).
    """
    if SCALE == "e4m3":
        s0, s1 = _e4m3_scales(words, NB, KB)
        if not INTERP:
            s0, s1 = _pair(s0, DTYPE), _pair(s1, DTYPE)
    elif SCALE == "e8m0":
        if INTERP:
            a0, a1, b0, b1 = _scale_bytes(words, NB, KB)
            a0, a1 = _power_of_two(a0), _power_of_two(a1)
            b0, b1 = _power_of_two(b0), _power_of_two(b1)
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
                args=[tl.reshape(words, (NB, KB, 4, 8))],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        s0, s1 = tl.join(a0, a1), tl.join(b0, b1)
    else:
        if INTERP:
            lo, hi = _halves(words, SCALE)
        else:
            lo, hi = tl.inline_asm_elementwise(
                "{ prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232; }",
                "=&r,=&r,r",
                args=[words],
                dtype=(tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        s0, s1 = _by_row(lo, hi, GROUP, NB, KB, SK)
    return s0, s1


@triton.jit
def _row_scales(words, GROUP: tl.constexpr, SCALE: tl.constexpr, NB: tl.constexpr):
    """fp32 scales [64 * NB] for each of the two groups of one column of tiles, from words [NB, 1, ...].

    With groups of 64 and more, both are equal.
    """
    if SCALE == "e8m0":
        a0, a1, b0, b1 = _scale_bytes(words, NB, 1)
        s0 = tl.join(_power_of_two(a0), _power_of_two(a1))
        s1 = tl.join(_power_of_two(b0), _power_of_two(b1))
    else:
        lo, hi = _halves(words, SCALE)
        s0, s1 = _by_row(lo, hi, GROUP, NB, 1, 1)
    # [nb 1 warp g group h] -> one tensor per group, rows (nb warp h g)
    first, second = tl.split(tl.permute(tl.join(s0, s1), (0, 1, 2, 5, 3, 4)))
    return tl.reshape(first, (NB * 64,)), tl.reshape(second, (NB * 64,))


@triton.jit
def _centers(
    words, FORMAT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, NB: tl.constexpr,
    KB: tl.constexpr, SK: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Values to subtract from the codes of `_numbers`, shaped as `_scales`, from words of zero points."""
    u = words.to(tl.uint32, bitcast=True)
    lo, hi = u & 0xFFFF, u >> 16
    if INTERP:
        offset: tl.constexpr = 128.0 if FORMAT == "int8" else 0.0
        lo = lo.to(tl.float32) - offset
        hi = hi.to(tl.float32) - offset
    elif HALF:
        lo = _doubled(lo | 0x6400).to(tl.int32, bitcast=True)  # 1024 + zero
        hi = _doubled(hi | 0x6400).to(tl.int32, bitcast=True)
    elif FORMAT == "int4":
        lo = _doubled(lo | 0x4300).to(tl.int32, bitcast=True)  # 128 + zero
        hi = _doubled(hi | 0x4300).to(tl.int32, bitcast=True)
    else:
        lo = (lo.to(tl.float32) - 128.0).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        hi = (hi.to(tl.float32) - 128.0).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        lo = _doubled(lo).to(tl.int32, bitcast=True)
        hi = _doubled(hi).to(tl.int32, bitcast=True)
    return _by_row(lo, hi, GROUP, NB, KB, SK)


@triton.jit
def _spread(s, FORMAT: tl.constexpr, NB: tl.constexpr, KB: tl.constexpr):
    """Broadcasts values [NB, KB, 4, 8, groups] to the words that they apply to."""
    if FORMAT == "nvfp4":
        s = tl.broadcast_to(tl.reshape(s, (NB, KB, 4, 8, 1, 4)), (NB, KB, 4, 8, 4, 4))
    elif _is_wide(FORMAT):
        s = tl.reshape(tl.permute(s, (0, 1, 2, 4, 3)), (NB, KB, 4, 2, 8, 1, 1, 1))
        s = tl.broadcast_to(s, (NB, KB, 4, 2, 8, 4, 2, 2))
    else:
        s = tl.reshape(s, (NB, KB, 4, 8, 1, 2, 1))
        s = tl.broadcast_to(s, (NB, KB, 4, 8, 4, 2, 2))
        s = tl.reshape(s, (NB, KB, 4, 8, 4, 4))
    return s


@triton.jit
def _pairs(register):
    """The two bf16 values of each uint32, low then high, in fp32 on a new last axis."""
    return tl.join(register << 16, register & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _numbers_interpreted(words, FORMAT: tl.constexpr):
    """fp32 values of the codes of words without assembly; new last axes (b, h), for 4-bit codes (b, h, k8).

    INT4 codes are unsigned, INT8 codes signed.
    """
    x = words.to(tl.uint32, bitcast=True)
    if _is_wide(FORMAT):
        low = tl.join(x & 255, (x >> 16) & 255)
        high = tl.join((x >> 8) & 255, x >> 24)
        code = tl.join(low, high)
        if FORMAT == "mxfp8":
            v = _e4m3(((code & 0x80) << 24) | ((code & 0x7F) << 20))
            v = tl.where((code & 0x7F) == 0x7F, float("nan"), v)
        else:
            v = (code ^ 0x80).to(tl.float32) - 128.0
    else:
        if FORMAT == "mxfp4" or FORMAT == "nvfp4":
            r0 = x & 0x81C081C0
            r1 = ((x >> 4) | (x << 28)) & 0x81C081C0
            r2 = (x << 6) & 0x81C081C0
            r3 = (((x >> 6) | (x << 26)) & 0x81808180) | ((x << 2) & 0x00400040)
        else:
            r0 = (x & 0x000F000F) | 0x43004300
            r1 = ((x >> 4) & 0x000F000F) | 0x43004300
            r2 = ((x >> 8) & 0x000F000F) | 0x43004300
            r3 = ((x >> 12) & 0x000F000F) | 0x43004300
        v = tl.join(tl.join(_pairs(r0), _pairs(r1)), tl.join(_pairs(r2), _pairs(r3)))
        v = v - 128.0 if FORMAT == "int4" else v * 8.507059173023462e37
    return v


@triton.constexpr_function
def _code(FORMAT, ZERO, SCALED, HALF):
    return DEQUANTIZATIONS[FORMAT, ZERO, SCALED, HALF][0]


@triton.constexpr_function
def _constraints(FORMAT, ZERO, SCALED, HALF):
    return DEQUANTIZATIONS[FORMAT, ZERO, SCALED, HALF][1]


@triton.jit
def _numbers(
    words, c0, c1, s0, s1,
    FORMAT: tl.constexpr, ZERO: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Weights in `DTYPE`: codes minus c if ZERO, times s if SCALED; axes as in `_numbers_interpreted`."""
    CODE: tl.constexpr = _code(FORMAT, ZERO, SCALED, tl.float16 == DTYPE)
    CONSTRAINTS: tl.constexpr = _constraints(FORMAT, ZERO, SCALED, tl.float16 == DTYPE)
    if ZERO and SCALED:
        given = (words, c0, c1, s0, s1)
    elif ZERO:
        given = (words, c0, c1)
    elif SCALED:
        given = (words, s0, s1)
    else:
        given = (words,)
    if _is_wide(FORMAT):
        r00, r01, r10, r11 = tl.inline_asm_elementwise(
            CODE, CONSTRAINTS, given,
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
        v = tl.join(tl.join(r00, r01), tl.join(r10, r11))
    else:
        r00, r01, r10, r11, r20, r21, r30, r31 = tl.inline_asm_elementwise(
            CODE, CONSTRAINTS, given,
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        low = tl.join(tl.join(r00, r01), tl.join(r10, r11))
        high = tl.join(tl.join(r20, r21), tl.join(r30, r31))
        v = tl.join(low, high)
    return v.to(DTYPE, bitcast=True)


@triton.jit
def _by_half(p0, p1, FORMAT: tl.constexpr):
    """Per-word values of rows g and of rows g + 8, shaped to broadcast with `_numbers_interpreted`."""
    p = tl.join(p0, p1)
    n: tl.constexpr = p.shape
    if _is_wide(FORMAT):
        p = tl.reshape(p, (n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], 1, 2))
    else:
        p = tl.reshape(p, (n[0], n[1], n[2], n[3], n[4], n[5], 1, 2, 1))
    return p


@triton.jit
def _dequantized(
    words, scales, zeros,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, AT: tl.constexpr,
    DTYPE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SK: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """[BN, BK] weights from words of codes, scales and zero points; scaled if AT is ``weights``.

    With INTERP they are fp32 values rounded to `DTYPE`.
    """
    NB: tl.constexpr = BN // 64
    KB: tl.constexpr = BK // 64
    HALF: tl.constexpr = tl.float16 == DTYPE
    SCALED: tl.constexpr = AT == "weights"
    if _is_wide(FORMAT):
        words = tl.reshape(words, (NB, KB, 4, 2, 8, 4, 2, 2))
    else:
        words = tl.reshape(words, (NB, KB, 4, 8, 4, 4))
    c0, c1, s0, s1 = words, words, words, words
    if ZERO:
        c0, c1 = _centers(zeros, FORMAT, GROUP, HALF, NB, KB, SK, INTERP)
        c0 = _spread(c0, FORMAT, NB, KB)
        c1 = _spread(c1, FORMAT, NB, KB)
    if SCALED:
        s0, s1 = _scales(scales, GROUP, SCALE, DTYPE, NB, KB, SK, INTERP)
        s0 = _spread(s0, FORMAT, NB, KB)
        s1 = _spread(s1, FORMAT, NB, KB)
    if INTERP:
        v = _numbers_interpreted(words, FORMAT)
        if ZERO:
            v = v - _by_half(c0, c1, FORMAT)
        elif FORMAT == "int4":
            v = v - 8.0
        if SCALED:
            v = _nearest(v * _by_half(s0, s1, FORMAT), DTYPE, INTERP)
            v = v.to(tl.float16).to(tl.float32) if HALF else v
    else:
        v = _numbers(words, c0, c1, s0, s1, FORMAT, ZERO, SCALED, DTYPE)
    # -> rows (nb warp h g), columns (kb j k8 c b)
    if _is_wide(FORMAT):  # [nb kb warp jj g c jl k8 b h]
        v = tl.permute(v, (0, 2, 9, 4, 1, 3, 6, 7, 5, 8))
    else:  # [nb kb warp g c j b h k8]
        v = tl.permute(v, (0, 2, 7, 3, 1, 5, 8, 4, 6))
    return tl.reshape(v, (BN, BK))
