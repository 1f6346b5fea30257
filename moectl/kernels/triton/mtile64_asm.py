"""PTX that dequantizes one word of the layout ``moectl-mtile64`` to 16-bit floats.

For ``tl.inline_asm_elementwise`` with ``pack=1``, so that the result does not depend on the order in which
a thread holds its words. Results are 16-bit patterns, eight for 4-bit codes and four for 8-bit codes. All
instructions exist from sm_80 on.

MXFP4 and NVFP4: sign, exponent and mantissa bits are moved to bits 15, 8:7 and 6 of a bf16, which gives value
* 2^-126 (subnormal for 0.5), or to bits 15, 11:10 and 9 of an fp16, value * 2^-14; multiplying by the power
of two is exact. MXFP8: those of E4M3 likewise, times 2^-120 or 2^-8, and a carry out of seven ones makes NaN.
INT4: ``0x4300 | u`` is 128 + u in bf16, ``0x6400 | u`` is 1024 + u in fp16. INT8, two's complement: ``0x4300
| low bits`` and ``0xC300 | sign bit`` add up to the value in bf16; ``byte ^ 0x6480`` is 1152 + value in fp16.
Then the zero point is subtracted (8 for symmetric INT4), and the result is multiplied by the scale.
"""

from __future__ import annotations

from itertools import product

_KEEP, _KEEP_3, _MANTISSA = "0x81C081C0", "0x81808180", "0x00400040"
_AND_OR, _AND_XOR = "0xEA", "0x6A"


def _mxfp4(half: bool) -> list[str]:
    lines = [
        f"and.b32 r0, w, {_KEEP}",
        "shf.r.wrap.b32 t, w, w, 4",
        f"and.b32 r1, t, {_KEEP}",
        "shl.b32 t, w, 6",
        f"and.b32 r2, t, {_KEEP}",
        "shf.r.wrap.b32 t, w, w, 6",
        f"and.b32 u, t, {_KEEP_3}",
        "shl.b32 t, w, 2",
        f"lop3.b32 r3, t, {_MANTISSA}, u, {_AND_OR}",
    ]
    power = "0x74007400" if half else "0x7E807E80"
    for r in range(4):
        if half:
            lines += [
                f"shl.b32 t, r{r}, 3",
                "and.b32 t, t, 0x0E000E00",
                f"lop3.b32 r{r}, r{r}, 0x80008000, t, {_AND_OR}",
            ]
        lines += [f"mov.b32 t, {power}", _times(r, "t", half)]
    return lines


def _mxfp8(half: bool) -> list[str]:
    bits, shift, one, power = (
        ("0x3F803F80", 1, "0x00800080", "0x5C005C00")
        if half
        else ("0x07F007F0", 4, "0x00100010", "0x7B807B80")
    )
    lines = []
    for r in range(2):
        lines += [f"shl.b32 t, w, {8 - 8 * r}", f"shr.u32 u, t, {shift}", f"and.b32 u, u, {bits}"]
        lines += [f"lop3.b32 r{r}, t, 0x80008000, u, {_AND_OR}", f"add.u32 u, r{r}, {one}"]
        if half:
            lines.append(f"lop3.b32 r{r}, u, 0x40004000, r{r}, {_AND_OR}")
        else:
            lines += ["and.b32 u, u, 0x08000800", f"mad.lo.u32 r{r}, u, 15, r{r}"]
        lines += [f"mov.b32 t, {power}", _times(r, "t", half)]
    return lines


def _int4(zero: bool, half: bool) -> list[str]:
    base, base_plus_8 = ("0x64006400", "0x64086408") if half else ("0x43004300", "0x43084308")
    lines = []
    for r in range(4):
        lines += [f"shr.u32 t, w, {4 * r}", f"lop3.b32 r{r}, t, 0x000F000F, {base}, {_AND_OR}"]
    lines.append(f"mov.b32 t, {base_plus_8}")
    return lines if zero else lines + [_minus(r, "t", half) for r in range(4)]


def _int8(zero: bool, half: bool) -> list[str]:
    lines = []
    for r in range(2):
        lines.append(f"shr.u32 t, w, {8 * r}")
        if half:
            lines.append(f"lop3.b32 r{r}, t, 0x00FF00FF, 0x64806480, {_AND_XOR}")
            lines += [] if zero else ["mov.b32 u, 0x64806480", _minus(r, "u", half)]
        else:
            lines += [
                f"lop3.b32 u, t, 0x00800080, 0xC300C300, {_AND_OR}",
                f"lop3.b32 r{r}, t, 0x007F007F, 0x43004300, {_AND_OR}",
                "mov.b32 t, 0x3F803F80",
                f"fma.rn.bf16x2 r{r}, r{r}, t, u",
            ]
    return lines


def _times(r: int, factor: str, half: bool) -> str:
    """Register r times `factor`; bf16 as ``fma(a, b, -0)``, which sm_80 has and which keeps signed zeros."""
    return f"mul.rn.f16x2 r{r}, r{r}, {factor}" if half else f"fma.rn.bf16x2 r{r}, r{r}, {factor}, none"


def _minus(r: int, subtrahend: str, half: bool) -> str:
    return (
        f"sub.rn.f16x2 r{r}, r{r}, {subtrahend}" if half else f"fma.rn.bf16x2 r{r}, {subtrahend}, less, r{r}"
    )


_FLOATS = {"mxfp4": _mxfp4, "nvfp4": _mxfp4, "mxfp8": _mxfp8}

WIDE = frozenset({"mxfp8", "int8"})
"""Formats with codes of 8 bits."""


def _dequantization(name: str, zero: bool, scaled: bool, half: bool) -> tuple[str, str]:
    registers = 2 if name in WIDE else 4
    results = 2 * registers
    operands = iter(range(results, results + 5))
    lines = [".reg .b32 w, t, u, none, less, r0, r1, r2, r3", f"mov.b32 w, ${next(operands)}"]
    lines += ["mov.b32 none, 0x80008000", "mov.b32 less, 0xBF80BF80"]
    lines += _FLOATS[name](half) if name in _FLOATS else (_int4 if name == "int4" else _int8)(zero, half)
    inputs = 1
    for enabled, operation in ((zero, _minus), (scaled, _times)):
        if enabled:
            rows = (f"${next(operands)}", f"${next(operands)}")
            lines += [operation(r, rows[r % 2], half) for r in range(registers)]
            inputs += 2
    lines += [f"mov.b32 {{${2 * r}, ${2 * r + 1}}}, r{r}" for r in range(registers)]
    code = "{\n" + "\n".join(f"    {line};" for line in lines) + "\n}"
    return code, ",".join(["=&h"] * results + ["r"] * inputs)


DEQUANTIZATIONS: dict[tuple[str, bool, bool, bool], tuple[str, str]] = {
    (name, zero, scaled, half): _dequantization(name, zero, scaled, half)
    for name in (*_FLOATS, "int4", "int8")
    for zero, scaled, half in product((False, True), repeat=3)
}
"""PTX and its constraints by (format, zero points, scales, fp16 instead of bf16).

Inputs are a word of codes; with zero points, the values to subtract in rows g and in rows g + 8; with scales,
the scales of both rows. Both are pairs of equal halves. Register r holds k8 = r / 2, h = r % 2 of 4-bit
codes, and h = r of 8-bit codes; the results are the halves of the registers in order.
"""
