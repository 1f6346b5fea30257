"""PTX of the dequantization: words of the layout ``moectl-mtile64`` to pairs of 16-bit numbers.

For ``tl.inline_asm_elementwise`` over four code bytes, or four 16-bit numbers, at a time. Operands are
numbered results first. Everything exists from sm_80 on.

MXFP4: sign, exponent and mantissa bits are moved to bits 15, 8:7 and 6 of a bf16, which then is value *
2^-126 (subnormal for 0.5), or on to bits 15, 11:10 and 9 of an fp16, value * 2^-14; the product with the
power of two is exact. INT4: ``0x4300 | u`` is 128 + u in bf16, ``0x6400 | u`` 1024 + u in fp16. INT8, two's
complement: ``0x4300 | low bits`` and ``0xC300 | sign bit`` add up to the value in bf16; ``byte ^ 0x6480``
is 1152 + the value in fp16. A center is taken off where it is a constant.
"""

from __future__ import annotations

from itertools import product

_KEEP, _KEEP_3, _MANTISSA = "0x81C081C0", "0x81808180", "0x00400040"
_AND_OR, _AND_XOR = "0xEA", "0x6A"
_ONE = "0x3F803F80"
_MINUS_ONE = "0xBF80BF80"
_MINUS_ZERO = "0x80008000"
"""bf16 pairs; ``fma(a, b, -0)`` is a product that keeps the sign of zero, and sm_80 has no other."""


def _block(lines: list[str]) -> str:
    return "{\n" + "\n".join(f"    {line};" for line in lines) + "\n}"


def _mxfp4(half: bool) -> list[str]:
    lines = [
        ".reg .b32 t, u, up, zero",
        f"and.b32 $0, $4, {_KEEP}",
        "shf.r.wrap.b32 t, $4, $4, 4",
        f"and.b32 $1, t, {_KEEP}",
        "shl.b32 t, $4, 6",
        f"and.b32 $2, t, {_KEEP}",
        "shf.r.wrap.b32 t, $4, $4, 6",
        f"and.b32 u, t, {_KEEP_3}",
        "shl.b32 t, $4, 2",
        f"lop3.b32 $3, t, {_MANTISSA}, u, {_AND_OR}",
    ]
    if not half:
        lines += ["mov.b32 up, 0x7E807E80", f"mov.b32 zero, {_MINUS_ZERO}"]
        return lines + [f"fma.rn.bf16x2 ${r}, ${r}, up, zero" for r in range(4)]
    lines.append("mov.b32 up, 0x74007400")
    for r in range(4):
        lines += [
            f"shl.b32 t, ${r}, 3",
            "and.b32 t, t, 0x0E000E00",
            f"lop3.b32 ${r}, ${r}, {_MINUS_ZERO}, t, {_AND_OR}",
            f"mul.rn.f16x2 ${r}, ${r}, up",
        ]
    return lines


def _int4(zero: bool, half: bool) -> list[str]:
    place = "0x64006400" if half else "0x43004300"
    lines = [".reg .b32 t, one, off"]
    for r in range(4):
        taken = "$4" if r == 0 else "t"
        lines += [] if r == 0 else [f"shr.b32 t, $4, {4 * r}"]
        lines.append(f"lop3.b32 ${r}, {taken}, 0x000F000F, {place}, {_AND_OR}")
    if zero:
        return lines
    if half:
        lines.append("mov.b32 off, 0x64086408")
        return lines + [f"sub.rn.f16x2 ${r}, ${r}, off" for r in range(4)]
    lines += [f"mov.b32 one, {_ONE}", "mov.b32 off, 0xC308C308"]
    return lines + [f"fma.rn.bf16x2 ${r}, ${r}, one, off" for r in range(4)]


def _int8(zero: bool, half: bool) -> list[str]:
    lines = [".reg .b32 t, u, one, off", "shr.u32 t, $2, 8"]
    if half:
        lines += [
            f"lop3.b32 ${r}, {word}, 0x00FF00FF, 0x64806480, {_AND_XOR}" for r, word in ((0, "$2"), (1, "t"))
        ]
        if zero:
            return lines
        lines.append("mov.b32 off, 0x64806480")
        return lines + [f"sub.rn.f16x2 ${r}, ${r}, off" for r in range(2)]
    lines.append(f"mov.b32 one, {_ONE}")
    for r, word in ((0, "$2"), (1, "t")):
        lines += [
            f"lop3.b32 u, {word}, 0x00800080, 0xC300C300, {_AND_OR}",
            f"lop3.b32 ${r}, {word}, 0x007F007F, 0x43004300, {_AND_OR}",
            f"fma.rn.bf16x2 ${r}, ${r}, one, u",
        ]
    return lines


def _numbers(name: str, zero: bool, half: bool) -> str:
    if name == "mxfp4":
        return _block(_mxfp4(half))
    return _block((_int4 if name == "int4" else _int8)(zero, half))


NUMBERS: dict[tuple[str, bool, bool], str] = {
    key: _numbers(*key) for key in product(("mxfp4", "int4", "int8"), (False, True), (False, True))
}
"""By format, zero points, and whether fp16 comes out. A word in; four registers, of int8 two, out."""

_OPERATIONS = {
    ("times", False): "fma.rn.bf16x2 {to}, {a}, {b}, constant",
    ("times", True): "mul.rn.f16x2 {to}, {a}, {b}",
    ("minus", False): "fma.rn.bf16x2 {to}, {b}, constant, {a}",
    ("minus", True): "sub.rn.f16x2 {to}, {a}, {b}",
}


def _with_rows(operation: str, half: bool) -> str:
    constant = _MINUS_ZERO if operation == "times" else _MINUS_ONE
    line = _OPERATIONS[operation, half]
    lines = [".reg .b32 constant", f"mov.b32 constant, {constant}"]
    return _block(lines + [line.format(to=f"${h}", a=f"${2 + h}", b=("$4", "$8")[h]) for h in range(2)])


WITH_ROWS: dict[tuple[str, bool], str] = {key: _with_rows(*key) for key in _OPERATIONS}
"""Two registers, of rows g and g + 8, times or minus pairs of equal halves for each: the results' inputs
are four numbers, then four pairs for row g and four for row g + 8, of which the first counts."""
