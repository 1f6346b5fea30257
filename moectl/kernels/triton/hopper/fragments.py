# mypy: ignore-errors
"""Device code that dequantizes tiles of the layout ``moectl-mtile64`` into A operands of wgmma and mma.

A tile is 64 rows by 64 columns. Each of 128 threads owns 16 bytes of its codes (int8: twice 16), and they
are exactly the thread's elements of the operand: no value moves between threads, which the layout conversion
at the end of `fragment` asserts. Scale words belong to rows; four lanes share them.

``FORMAT`` is "mxfp4", "nvfp4", "mxfp8", "int4" or "int8"; ``GROUP`` is 16 or 32, or any other value for
groups of 64 columns and more; ``ZEROS``: integer codes have zero points; ``DTYPE`` is the operand's. MXFP4
and MXFP8 operands are bf16 only. Unless ``EXACT``, values carry a power of two (`fold_factor`), which for
int4 requires bf16 scales and operands and no zero points. Global scales are the epilogue's. `fragment_asm`
has the constants and the PTX.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...choice.tile_family import scale_words as words_of_tile
from .fragment_asm import (
    FOLDED_SCALES_ASM,
    _asm,
    _e4m3_multipliers_asm,
    _e8m0_multipliers_asm,
    _registers,
    _zero_asm,
    is_wide,
)


@gluon.constexpr_function
def tile_bytes(FORMAT):
    """Bytes of one tile's codes."""
    return 4096 if is_wide(FORMAT) else 2048


scale_words = gluon.constexpr_function(words_of_tile)


@gluon.constexpr_function
def code_lines(FORMAT):
    """128-byte lines of a tile's codes."""
    return tile_bytes(FORMAT) // 128


@gluon.constexpr_function
def code_layout(FORMAT):
    """Register layout of a tile's codes, ``[lines, 128]`` bytes: a thread has one or two runs of 16 bytes."""
    columns = [[0, 1], [0, 2], [0, 4], [0, 8]]
    lanes = [[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]]
    if is_wide(FORMAT):
        return gl.DistributedLinearLayout([*columns, [4, 0]], lanes, [[8, 0], [16, 0]], [], [32, 128])
    return gl.DistributedLinearLayout(columns, lanes, [[4, 0], [8, 0]], [], [16, 128])


@gluon.constexpr_function
def _half(DTYPE):
    return gl.float16 == DTYPE


@gluon.constexpr_function
def _lanes():
    return gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def scale_layout(FORMAT, GROUP):
    """Register layout of a tile's scale words, ``[32]`` or ``[64]``: four lanes share the words of a row."""
    if scale_words(FORMAT, GROUP) == 64:
        registers, one = [[1]], 2
    else:
        registers, one = [], 1
    lanes = [[0], [0], [one], [2 * one], [4 * one]]
    return gl.DistributedLinearLayout(registers, lanes, [[8 * one], [16 * one]], [], [32 * one])


@gluon.jit
def _folded_scales(words):
    """Scales and addends of a folded int4 fragment, two in each word."""
    return gl.inline_asm_elementwise(FOLDED_SCALES_ASM, "=&r,=&r,r", [words], (gl.int32, gl.int32), True, 1)


@gluon.constexpr_function
def _pieces(FORMAT):
    """A thread's axes within one group of columns, which follow (warp, g, c)."""
    return [2, 2, 2, 2] if is_wide(FORMAT) else [2, 2] if FORMAT == "nvfp4" else [2, 2, 2]


@gluon.constexpr_function
def _ones(FORMAT):
    return [4, 8, 4, *([1] * len(_pieces(FORMAT)))]


@gluon.constexpr_function
def _whole(FORMAT):
    return [4, 8, 4, *_pieces(FORMAT)]


@gluon.jit
def _spread_words(s, FORMAT: gl.constexpr, LIKE: gl.constexpr):
    """[4, 8] words broadcast over the lanes that share them and over a thread's elements, in layout LIKE."""
    ONES: gl.constexpr = _ones(FORMAT)
    WHOLE: gl.constexpr = _whole(FORMAT)
    s = gl.expand_dims(gl.convert_layout(s, gl.SliceLayout(2, _lanes()), assert_trivial=True), 2)
    s, _ = gl.broadcast(s, gl.full([4, 8, 4], 0, gl.int32, s.type.layout))
    s = s.reshape(ONES)
    s, _ = gl.broadcast(s, gl.full(WHOLE, 0, gl.int32, s.type.layout))
    return gl.convert_layout(s, LIKE, assert_trivial=True)


@gluon.jit
def _e8m0_multipliers(words, EXACT: gl.constexpr):
    """Words of four E8M0 bytes as pairs of equal bf16 multipliers: rows g and g + 8, groups 0 and 1.

    Folded: the exponent field is s + 64. Exact: 2^(s - 127), subnormal for s = 0.
    """
    ASM: gl.constexpr = _e8m0_multipliers_asm(EXACT)
    return gl.inline_asm_elementwise(
        ASM, _registers(4, 1), [words], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )


@gluon.jit
def _e4m3_multipliers(words, HALF: gl.constexpr):
    """Words of four E4M3 scales as pairs of equal multipliers: rows g and g + 8, groups 0 and 1."""
    ASM: gl.constexpr = _e4m3_multipliers_asm(HALF)
    return gl.inline_asm_elementwise(
        ASM, _registers(4, 1), [words], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )


@gluon.jit
def _halves(words):
    """Both halves of a word, each duplicated by moves that ptxas folds into the multiplications."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; mov.b32 $0, {l, l}; mov.b32 $1, {h, h}; }",
        "=&r,=&r,r",
        [words],
        (gl.int32, gl.int32),
        True,
        1,
    )


@gluon.jit
def _row_halves(words, GROUP: gl.constexpr):
    """Duplicated scales or zero points of integer codes: (row g, group 0), (g, 1), (g + 8, 0), (g + 8, 1)."""
    if GROUP == 32:
        w0, w1 = gl.split(words.reshape([4, 8, 2]))
        a0, a1 = _halves(w0)
        b0, b1 = _halves(w1)
    else:
        a0, b0 = _halves(words.reshape([4, 8]))
        a1 = a0
        b1 = b0
    return a0, a1, b0, b1


@gluon.jit
def _zero_addends(words, FORMAT: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr):
    """Addends that subtract the zero points, in the order of `_row_halves`."""
    ASM: gl.constexpr = _zero_asm(FORMAT, HALF)
    a0, a1, b0, b1 = _row_halves(words, GROUP)
    a0 = gl.inline_asm_elementwise(ASM, "=r,r", [a0], gl.int32, True, 1)
    b0 = gl.inline_asm_elementwise(ASM, "=r,r", [b0], gl.int32, True, 1)
    if GROUP == 32:
        a1 = gl.inline_asm_elementwise(ASM, "=r,r", [a1], gl.int32, True, 1)
        b1 = gl.inline_asm_elementwise(ASM, "=r,r", [b1], gl.int32, True, 1)
    else:
        a1 = a0
        b1 = b0
    return a0, a1, b0, b1


@gluon.jit
def _parts(doubled):
    """A duplicated fp16 as the sum of two duplicated bf16, exact except for subnormals."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 p, q;
        .reg .f32 f, g;
        mov.b32 {p, q}, $2;
        cvt.f32.f16 f, p;
        cvt.rn.bf16x2.f32 $0, f, f;
        shl.b32 $1, $0, 16;
        mov.b32 g, $1;
        sub.f32 f, f, g;
        cvt.rn.bf16x2.f32 $1, f, f;
        }""",
        "=&r,=&r,r",
        [doubled],
        (gl.int32, gl.int32),
        True,
        1,
    )


@gluon.jit
def _decoded(
    w, a, b, az, bz, al, bl,
    FORMAT: gl.constexpr, EXACT: gl.constexpr, ZEROS: gl.constexpr, SPLIT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Dequantized values of one group of columns, in the layout of the code bytes `w`.

    `a` and `b` are scales of rows g and g + 8, `az` and `bz` their zero points, `al` and `bl` the low parts
    of SPLIT scales. 4-bit codes give two tensors, k8 = 0 and 1; 8-bit ones the same tensor twice.
    """
    LIKE: gl.constexpr = w.type.layout
    HALF: gl.constexpr = _half(DTYPE)
    sa = _spread_words(a, FORMAT, LIKE)
    sb = _spread_words(b, FORMAT, LIKE)
    if ZEROS:
        za = _spread_words(az, FORMAT, LIKE)
        zb = _spread_words(bz, FORMAT, LIKE)
    if SPLIT:
        la = _spread_words(al, FORMAT, LIKE)
        lb = _spread_words(bl, FORMAT, LIKE)
    if ZEROS and SPLIT:
        operands = [w, sa, sb, za, zb, la, lb]
    elif ZEROS:
        operands = [w, sa, sb, za, zb]
    elif SPLIT:
        operands = [w, sa, sb, la, lb]
    else:
        operands = [w, sa, sb]
    IN: gl.constexpr = 9 + (8 if ZEROS else 0) + (8 if SPLIT else 0)
    ASM: gl.constexpr = _asm(FORMAT, HALF, ZEROS, EXACT, SPLIT)
    if is_wide(FORMAT):
        if HALF:
            r0 = gl.inline_asm_elementwise(ASM, _registers(2, IN), operands, gl.float16, True, 4)
        else:
            r0 = gl.inline_asm_elementwise(ASM, _registers(2, IN), operands, gl.bfloat16, True, 4)
        r1 = r0
    else:
        if HALF:
            r0, r1 = gl.inline_asm_elementwise(
                ASM, _registers(4, IN), operands, (gl.float16, gl.float16), True, 4
            )
        else:
            r0, r1 = gl.inline_asm_elementwise(
                ASM, _registers(4, IN), operands, (gl.bfloat16, gl.bfloat16), True, 4
            )
    return r0, r1


@gluon.jit
def fragment(
    codes, scales, zeros, FORMAT: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr,
    EXACT: gl.constexpr, DTYPE: gl.constexpr, OPERAND: gl.constexpr, SPLIT: gl.constexpr = False,
):  # fmt: skip
    """[64, 64] weights in layout OPERAND, from codes (`code_layout`), scale and zero words (`scale_layout`).

    `zeros` is ignored without ZEROS. SPLIT: fp16 scales with a bf16 operand, for int4 only.
    """
    if FORMAT == "nvfp4":
        v = _of_sixteens(codes, scales, DTYPE)
    else:
        v = _of_wider(codes, scales, zeros, FORMAT, GROUP, ZEROS, EXACT, DTYPE, SPLIT)
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def _of_sixteens(codes, scales, DTYPE: gl.constexpr):
    """`fragment` of NVFP4, whose four groups of columns have a word of a lane's codes each."""
    HALF: gl.constexpr = _half(DTYPE)
    F: gl.constexpr = "nvfp4"
    s0, s1 = gl.split(scales.reshape([4, 8, 2]))
    a0, a1, b0, b1 = _e4m3_multipliers(s0, HALF)
    a2, a3, b2, b3 = _e4m3_multipliers(s1, HALF)
    w = codes.reshape([4, 8, 4, 2, 2, 2, 2])  # warp g c kg jl h b
    first, second = gl.split(w.permute((0, 1, 2, 4, 5, 6, 3)))
    w0, w1 = gl.split(first.permute((0, 1, 2, 4, 5, 3)))
    w2, w3 = gl.split(second.permute((0, 1, 2, 4, 5, 3)))
    r00, r01 = _decoded(w0, a0, b0, a0, b0, a0, b0, F, False, False, False, DTYPE)
    r10, r11 = _decoded(w1, a1, b1, a1, b1, a1, b1, F, False, False, False, DTYPE)
    r20, r21 = _decoded(w2, a2, b2, a2, b2, a2, b2, F, False, False, False, DTYPE)
    r30, r31 = _decoded(w3, a3, b3, a3, b3, a3, b3, F, False, False, False, DTYPE)
    low = gl.join(gl.join(r00, r01), gl.join(r10, r11))
    high = gl.join(gl.join(r20, r21), gl.join(r30, r31))
    v = gl.join(low, high)  # warp g c h b k8 jl kg
    return v.permute((0, 3, 1, 7, 6, 5, 2, 4))  # warp h g | kg jl k8 c b


@gluon.jit
def _of_wider(
    codes, scales, zeros, FORMAT: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr,
    EXACT: gl.constexpr, DTYPE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """`fragment` of formats with one or two groups of columns in a tile."""
    FOLDED: gl.constexpr = FORMAT == "int4" and not EXACT
    ADDENDS: gl.constexpr = ZEROS or FOLDED
    if FORMAT == "mxfp4" or FORMAT == "mxfp8":
        a0, a1, b0, b1 = _e8m0_multipliers(scales.reshape([4, 8]), EXACT)
    elif FOLDED:
        scales, addends = _folded_scales(scales)
        a0, a1, b0, b1 = _row_halves(scales, GROUP)
    else:
        a0, a1, b0, b1 = _row_halves(scales, GROUP)
    if SPLIT:
        a0, la0 = _parts(a0)
        b0, lb0 = _parts(b0)
        if GROUP == 32:
            a1, la1 = _parts(a1)
            b1, lb1 = _parts(b1)
        else:
            a1, la1, b1, lb1 = a0, la0, b0, lb0
    else:
        la0, la1, lb0, lb1 = a0, a1, b0, b1
    if ZEROS:
        za0, za1, zb0, zb1 = _zero_addends(zeros, FORMAT, GROUP, _half(DTYPE))
    elif FOLDED:
        za0, za1, zb0, zb1 = _row_halves(addends, GROUP)
    else:
        za0, za1, zb0, zb1 = a0, a1, b0, b1
    if is_wide(FORMAT):
        w = codes.reshape([4, 2, 8, 4, 2, 2, 2, 2])  # warp kg g c jl k8 h b
        w0, w1 = gl.split(w.permute((0, 2, 3, 4, 5, 6, 7, 1)))
        v0, _ = _decoded(w0, a0, b0, za0, zb0, la0, lb0, FORMAT, EXACT, ADDENDS, SPLIT, DTYPE)
        v1, _ = _decoded(w1, a1, b1, za1, zb1, la1, lb1, FORMAT, EXACT, ADDENDS, SPLIT, DTYPE)
        v = gl.join(v0, v1).permute((0, 5, 1, 7, 3, 4, 2, 6))  # warp h g | kg jl k8 c b
    else:
        w = codes.reshape([4, 8, 4, 2, 2, 2, 2])  # warp g c kg jl h b
        w0, w1 = gl.split(w.permute((0, 1, 2, 4, 5, 6, 3)))
        r00, r01 = _decoded(w0, a0, b0, za0, zb0, la0, lb0, FORMAT, EXACT, ADDENDS, SPLIT, DTYPE)
        r10, r11 = _decoded(w1, a1, b1, za1, zb1, la1, lb1, FORMAT, EXACT, ADDENDS, SPLIT, DTYPE)
        v = gl.join(gl.join(r00, r01), gl.join(r10, r11))  # warp g c jl h b k8 kg
        v = v.permute((0, 4, 1, 7, 3, 6, 2, 5))  # warp h g | kg jl k8 c b
    return v
