# mypy: ignore-errors
"""PTX for `fragments`: dequantizes codes and scales of ``moectl-mtile64`` into the registers of an A operand.

Unless ``EXACT``, values carry a power of two that `fold_factor` undoes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FOLDED_SHIFT = 62
"""A folded MXFP4 fragment is the weight times 2^-62; the epilogue multiplies the sums by 2^62, exactly.

A code shifted into the bits of a bf16 is its value times 2^-126, and an E8M0 byte s means 2^(s - 127), so
one multiplication by the bf16 whose exponent field is s + 64 gives ``e2m1 * 2^(s - 127 - 62)``.
"""


FOLDED_INT4 = 33
"""A folded int4 fragment is the weight times 2^-33; one packed FMA dequantizes two codes.

A code u placed at the lowest exponent bit of a bf16 and the three bits below it reads as ``u * 2^-129``.
Multiplied by ``s * 2^96`` (s: the scale), with ``-8 * s * 2^-33`` added, it gives ``(u - 8) * s * 2^-33``,
rounded once, as without folding.
"""


FOLDED_MXFP8 = 56
"""A folded MXFP8 fragment is the weight times 2^-56.

The exponent and mantissa of E4M3, shifted to bits 4 to 10 of a bf16, are its value times 2^-120 (subnormals
too, but NaN would be 480), and are multiplied by the bf16 of MXFP4's scales.
"""

FOLDED_HALF_NVFP4 = 7
"""An fp16 NVFP4 fragment, without its global scale, is the weight times 2^-7; in bf16, 2^-`FOLDED_SHIFT`.

A code's value has at most 2 significant bits and an E4M3 scale's 4, so that their product is exact, from
2^-10 to 2688. It is always folded.
"""

FOLDED_SCALES = {"mxfp4": range(64, 191), "mxfp8": range(66, 191), "int4": range(34, 159)}
"""Biased exponents of the scales for which folding is lossless and cannot overflow; others need ``EXACT``.

MXFP4: scales from 2^-63 to 2^63, so the smallest nonzero weight is 2^-64; likewise MXFP8. int4: scales from
2^-93, below which a folded weight would lose bits, to below 2^32, which would overflow. A scale or E8M0 byte
of 0 gives 0.
"""


def fold_factor(weight_format: str, half: bool = False) -> float:
    """The factor by which the epilogue multiplies sums of folded fragments; `half`: they are fp16."""
    if half and weight_format == "nvfp4":
        return 2.0**FOLDED_HALF_NVFP4
    shifts = {
        "mxfp4": FOLDED_SHIFT,
        "nvfp4": FOLDED_SHIFT,
        "mxfp8": FOLDED_MXFP8,
        "int4": FOLDED_INT4,
    }
    return 2.0 ** shifts[weight_format]


@gluon.constexpr_function
def _e2m1_asm(HALF, EXACT):
    """A word to four registers of two 16-bit floats each: nine operations, then one or two products each.

    HALF: three operations more, from the places of a bf16's bits to those of an fp16's.
    """
    kind = "f16x2" if HALF else "bf16x2"
    first = "" if not EXACT else "".join(f"mul.rn.bf16x2 ${r}, ${r}, up;\n" for r in range(4))
    if HALF:
        first = "".join(
            f"shl.b32 t, ${r}, 3; and.b32 t, t, 0x0E000E00; lop3.b32 ${r}, ${r}, 0x80008000, t, 0xEA;\n"
            for r in range(4)
        )
    return (
        """{
        .reg .b32 t, u, up;
        mov.b32 up, 0x7E807E80;
        and.b32 $0, $4, 0x81C081C0;
        shf.r.wrap.b32 t, $4, $4, 4;
        and.b32 $1, t, 0x81C081C0;
        shl.b32 t, $4, 6;
        and.b32 $2, t, 0x81C081C0;
        shf.r.wrap.b32 t, $4, $4, 6;
        and.b32 u, t, 0x81808180;
        shl.b32 t, $4, 2;
        lop3.b32 $3, t, 0x00400040, u, 0xEA;
        """
        + first
        + "".join(f"mul.rn.{kind} ${r}, ${r}, ${5 + 4 * (r % 2)};\n" for r in range(4))
        + "}"
    )


@gluon.constexpr_function
def _int4_asm(HALF, ZEROS, SPLIT):
    """ORs codes into a mantissa as ``bias + u``, subtracts ``bias + zero``, multiplies by the scale.

    SPLIT: by the high and the low part of the scale. The product with the low part needs at most 8 bits and
    is exact, so the result is rounded once.
    """
    kind, bias, one, off = (
        ("f16x2", "0x64006400", "0x3C003C00", "0xE408E408")
        if HALF
        else ("bf16x2", "0x43004300", "0x3F803F80", "0xC308C308")
    )
    lines = ["{ .reg .b32 t, one, off;", f"mov.b32 one, {one};", f"mov.b32 off, {off};"]
    for r in range(4):
        if r:
            lines.append(f"shr.b32 t, $4, {4 * r};")
        lines.append(f"lop3.b32 ${r}, {'t' if r else '$4'}, 0x000F000F, {bias}, 0xEA;")
    for r in range(4):
        zero = f"${13 + 4 * (r % 2)}" if ZEROS else "off"
        lines.append(f"fma.rn.{kind} ${r}, ${r}, one, {zero};")
    for r in range(4):
        if SPLIT:
            low = 13 + 8 * ZEROS + 4 * (r % 2)
            lines.append(f"mul.rn.{kind} t, ${r}, ${low}; fma.rn.{kind} ${r}, ${r}, ${5 + 4 * (r % 2)}, t;")
        else:
            lines.append(f"mul.rn.{kind} ${r}, ${r}, ${5 + 4 * (r % 2)};")
    return "\n".join(lines) + "}"


@gluon.constexpr_function
def _folded_int4_asm():
    """A word to four registers of two bf16 each; $5 and $9 are the scales, $13 and $17 the addends."""
    lines = ["{ .reg .b32 t;"]
    for r, shift in enumerate(
        ("shl.b32 t, $4, 4;", "mov.b32 t, $4;", "shr.b32 t, $4, 4;", "shr.b32 t, $4, 8;")
    ):
        lines.append(f"{shift} and.b32 ${r}, t, 0x00F000F0;")
        lines.append(f"fma.rn.bf16x2 ${r}, ${r}, ${5 + 4 * (r % 2)}, ${13 + 4 * (r % 2)};")
    return "\n".join(lines) + "}"


FOLDED_SCALES_ASM = gl.constexpr(
    """{ .reg .b32 up, down;
    mov.b32 up, 0x6F806F80;
    mov.b32 down, 0xB080B080;
    mul.rn.bf16x2 $0, $2, up;
    mul.rn.bf16x2 $1, $2, down; }"""
)


@gluon.constexpr_function
def _int8_asm(HALF, ZEROS):
    """Bytes 0 and 2 to one register, 1 and 3 to the other; two's complement codes are exact in both types."""
    lines = ["{ .reg .b32 t, u, off;", "mov.b32 off, 0xE480E480;"]
    for h in range(2):
        source = "t" if h else "$2"
        if h:
            lines.append("shr.b32 t, $2, 8;")
        if HALF:
            lines.append(f"lop3.b32 ${h}, {source}, 0x00FF00FF, 0x64806480, 0x6A;")
            lines.append(f"add.rn.f16x2 ${h}, ${h}, off;")
        else:
            lines.append(f"lop3.b32 u, {source}, 0x00800080, 0xC300C300, 0xEA;")
            lines.append(f"lop3.b32 ${h}, {source}, 0x007F007F, 0x43004300, 0xEA;")
            lines.append(f"add.rn.bf16x2 ${h}, ${h}, u;")
    kind = "f16x2" if HALF else "bf16x2"
    if ZEROS:
        lines += [f"add.rn.{kind} ${h}, ${h}, ${11 + 4 * h};" for h in range(2)]
    lines += [f"mul.rn.{kind} ${h}, ${h}, ${3 + 4 * h};" for h in range(2)]
    return "\n".join(lines) + "}"


@gluon.constexpr_function
def _e4m3_asm(EXACT):
    """Bytes 0 and 2 to one register of two bf16, 1 and 3 to the other: seven operations, then the products.

    EXACT also makes NaN of NaN codes: a carry out of seven ones sets the rest of the exponent.
    """
    lines = ["{ .reg .b32 t, u, up; mov.b32 up, 0x7B807B80;"]
    for h in range(2):
        lines.append("shr.b32 t, $2, 4;" if h else "shl.b32 t, $2, 4; shl.b32 u, $2, 8;")
        lines.append("and.b32 t, t, 0x07F007F0;")
        lines.append(f"lop3.b32 ${h}, {'$2' if h else 'u'}, 0x80008000, t, 0xEA;")
        if EXACT:
            lines.append(f"add.u32 t, ${h}, 0x00100010; and.b32 t, t, 0x08000800;")
            lines.append(f"mad.lo.u32 ${h}, t, 15, ${h}; mul.rn.bf16x2 ${h}, ${h}, up;")
    lines += [f"mul.rn.bf16x2 ${h}, ${h}, ${3 + 4 * h};" for h in range(2)]
    return "\n".join(lines) + "}"


@gluon.constexpr_function
def is_wide(FORMAT):
    """Whether codes have 8 bits."""
    return FORMAT in ("int8", "mxfp8")


@gluon.constexpr_function
def _asm(FORMAT, HALF, ZEROS, EXACT, SPLIT):
    """The PTX that dequantizes one word of `FORMAT`."""
    if FORMAT in ("mxfp4", "nvfp4"):
        return _e2m1_asm(HALF, EXACT)
    if FORMAT == "mxfp8":
        return _e4m3_asm(EXACT)
    if FORMAT == "int4" and not EXACT:
        return _folded_int4_asm()
    return _int8_asm(HALF, ZEROS) if FORMAT == "int8" else _int4_asm(HALF, ZEROS, SPLIT)


@gluon.constexpr_function
def _zero_asm(FORMAT, HALF):
    """PTX from a zero point to the addend of a code: -(bias + zero) for int4, 128 - zero for int8."""
    if FORMAT == "int4":
        return f"or.b32 $0, $1, {'0xE400E400' if HALF else '0xC300C300'};"
    if HALF:
        return "{ .reg .b32 t, u; mov.b32 u, 0x64806480; or.b32 t, $1, 0x64006400; sub.rn.f16x2 $0, u, t; }"
    return """{ .reg .b32 t, u;
        lop3.b32 t, $1, 0x007F007F, 0xC300C300, 0xEA;
        and.b32 u, $1, 0x00800080;
        xor.b32 u, u, 0x43804380;
        add.rn.bf16x2 $0, t, u; }"""


@gluon.constexpr_function
def _registers(results, operands):
    """The constraint string for that many 32-bit results and operands."""
    return ",".join(["=&r"] * results + ["r"] * operands)


@gluon.constexpr_function
def _e8m0_multipliers_asm(EXACT):
    """A word of four E8M0 bytes to four registers, each with its multiplier twice, two bytes at a time."""
    if EXACT:
        make = "shl.b32 {0}, {0}, 7; max.u16x2 {0}, {0}, least;\n"
    else:
        make = "mad.lo.u32 {0}, {0}, 128, 0x20002000;\n"
    return (
        """{
        .reg .b32 even, odd, least;
        .reg .b16 l, h;
        mov.b32 least, 0x00400040;
        prmt.b32 even, $4, 0, 0x4240;
        prmt.b32 odd, $4, 0, 0x4341;
        """
        + make.format("even")
        + make.format("odd")
        + """
        mov.b32 {l, h}, even;
        mov.b32 $0, {l, l};
        mov.b32 $2, {h, h};
        mov.b32 {l, h}, odd;
        mov.b32 $1, {l, l};
        mov.b32 $3, {h, h};
        }"""
    )


@gluon.constexpr_function
def _e4m3_multipliers_asm(HALF):
    """A word of `word_orders.E4M3_PAIRS` to four registers, each with its multiplier twice.

    Of rows g and its first and second group, then of rows g + 8: the scale times 2^64, or 2^7 in fp16. In
    bf16, a first product makes numbers of E4M3's subnormals.
    """
    kind = "f16x2" if HALF else "bf16x2"
    powers = ("0x78007800",) if HALF else ("0x7B807B80", "0x5F805F80")
    lines = [
        "{ .reg .b32 p, q, up; .reg .b16 l, h;",
        "and.b32 p, $4, 0x07F007F0;",
        "shf.l.wrap.b32 q, $4, $4, 7; and.b32 q, q, 0x07F007F0;",
    ]
    if HALF:
        lines.append("shl.b32 p, p, 3; shl.b32 q, q, 3;")
    for power in powers:
        lines.append(f"mov.b32 up, {power}; mul.rn.{kind} p, p, up; mul.rn.{kind} q, q, up;")
    lines.append("mov.b32 {l, h}, p; mov.b32 $0, {l, l}; mov.b32 $2, {h, h};")
    lines.append("mov.b32 {l, h}, q; mov.b32 $1, {l, l}; mov.b32 $3, {h, h}; }")
    return "\n".join(lines)
