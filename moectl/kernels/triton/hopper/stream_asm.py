"""PTX of the streaming kernels: from the codes of one weight tile to mma instructions and scaled sums."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triton.experimental.gluon import language as gl

SOURCE = gl.constexpr(hashlib.sha256(Path(__file__).read_bytes()).hexdigest())
"""Hash of this file, on which kernels depend so that a change here recompiles them."""

FOUR = range(4)

A_REGISTERS = [f"a{i}" for i in FOUR]

PAIRS = ("s00", "s01", "s10", "s11")
"""NVFP4: registers of the scales of both rows, by group of 16 columns."""


@dataclass(frozen=True)
class FragmentCodes:
    """How a tile's words become the A registers a0..a3 of one m16n8k16 instruction.

    Attributes:
        text: PTX of one step; ``{w}`` is its word, ``{v}`` the second word of 8-bit codes.
        words: words per step.
        one: 1 as a pair of 16-bit floats.
        offset: the difference between the values in a0..a3 and unsigned codes; 0 for MXFP4.
        symmetric: -(offset + the code that means 0) as a pair of 16-bit floats; 0 if there is nothing to add.
        shift: sums are the products times 2^-shift.
        whole: PTX after `text` that makes NaN of NaN codes.
    """

    text: str
    words: int
    one: int = 0
    offset: float = 0.0
    symmetric: int = 0
    shift: int = 0
    whole: str = ""


_NIBBLES = """
lop3.b32 a0, {{w}}, 0x000F000F, {magic}, 0xEA;
shr.u32 t, {{w}}, 4;
lop3.b32 a1, t, 0x000F000F, {magic}, 0xEA;
shr.u32 t, {{w}}, 8;
lop3.b32 a2, t, 0x000F000F, {magic}, 0xEA;
shr.u32 t, {{w}}, 12;
lop3.b32 a3, t, 0x000F000F, {magic}, 0xEA;
"""

_E2M1 = """
and.b32 a0, {w}, 0x81C081C0;
shf.r.wrap.b32 t, {w}, {w}, 4;
and.b32 a1, t, 0x81C081C0;
shl.b32 t, {w}, 6;
and.b32 a2, t, 0x81C081C0;
shf.r.wrap.b32 t, {w}, {w}, 6;
and.b32 t, t, 0x81808180;
shl.b32 u, {w}, 2;
lop3.b32 a3, u, 0x00400040, t, 0xEA;
"""

_E2M1_HALF = _E2M1 + "".join(
    f"""
shl.b32 t, a{i}, 3;
and.b32 t, t, 0x0E000E00;
lop3.b32 a{i}, a{i}, 0x80008000, t, 0xEA;
"""
    for i in FOUR
)

_BYTES_BF16 = "".join(
    f"""
shr.u32 t, {{{word}}}, {8 * h};
lop3.b32 u, t, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 t, t, 0x00800080, 0xC300C300, 0xEA;
add.rn.bf16x2 a{2 * k8 + h}, t, u;
"""
    for k8, word in enumerate("wv")
    for h in range(2)
)

_BYTES_HALF = "".join(
    f"""
shr.u32 t, {{{word}}}, {8 * h};
lop3.b32 a{2 * k8 + h}, t, 0x00FF00FF, 0x64806480, 0x6A;
"""
    for k8, word in enumerate("wv")
    for h in range(2)
)

_E4M3_BF16 = "".join(
    f"""
shl.b32 t, {{{word}}}, 4;
and.b32 t, t, 0x07F007F0;
shl.b32 u, {{{word}}}, 8;
lop3.b32 a{2 * k8}, u, 0x80008000, t, 0xEA;
shr.u32 t, {{{word}}}, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 a{2 * k8 + 1}, {{{word}}}, 0x80008000, t, 0xEA;
"""
    for k8, word in enumerate("wv")
)

_E4M3_HALF = "".join(
    f"""
shl.b32 t, {{{word}}}, 7;
and.b32 t, t, 0x3F803F80;
shl.b32 u, {{{word}}}, 8;
lop3.b32 a{2 * k8}, u, 0x80008000, t, 0xEA;
shr.u32 t, {{{word}}}, 1;
and.b32 t, t, 0x3F803F80;
lop3.b32 a{2 * k8 + 1}, {{{word}}}, 0x80008000, t, 0xEA;
"""
    for k8, word in enumerate("wv")
)

_NAN_BF16 = "".join(
    f"""
add.u32 t, a{i}, 0x00100010;
and.b32 t, t, 0x08000800;
mad.lo.u32 a{i}, t, 15, a{i};
"""
    for i in FOUR
)
"""A carry out of seven ones, at bit 11, sets the exponent's upper four bits."""

_NAN_HALF = "".join(
    f"""
add.u32 t, a{i}, 0x00800080;
lop3.b32 a{i}, t, 0x40004000, a{i}, 0xEA;
"""
    for i in FOUR
)

_SCALED = "".join(f"\nmul.rn.{{kind}} a{i}, a{i}, m{i % 2};" for i in FOUR)
"""Rows g and rows g + 8 times their scales."""

CODES = {
    ("mxfp4", "bf16"): FragmentCodes(_E2M1, 1, shift=62),
    ("mxfp4", "fp16"): FragmentCodes(_E2M1_HALF, 1, shift=14),
    ("nvfp4", "bf16"): FragmentCodes(_E2M1 + _SCALED.format(kind="bf16x2"), 1, shift=55),
    ("nvfp4", "fp16"): FragmentCodes(_E2M1_HALF + _SCALED.format(kind="f16x2"), 1, shift=7),
    ("mxfp8", "bf16"): FragmentCodes(_E4M3_BF16, 2, shift=56, whole=_NAN_BF16),
    ("mxfp8", "fp16"): FragmentCodes(_E4M3_HALF, 2, shift=8, whole=_NAN_HALF),
    ("int4", "bf16"): FragmentCodes(_NIBBLES.format(magic="0x43004300"), 1, 0x3F803F80, 128.0, 0xC308C308),
    ("int4", "fp16"): FragmentCodes(_NIBBLES.format(magic="0x64006400"), 1, 0x3C003C00, 1024.0, 0xE408E408),
    ("int8", "bf16"): FragmentCodes(_BYTES_BF16, 2, 0x3F803F80, -128.0),
    ("int8", "fp16"): FragmentCodes(_BYTES_HALF, 2, 0x3C003C00, 1024.0, 0xE480E480),
}
"""By weight format and the tokens' dtype.

The bits of E2M1 codes are moved to the sign, exponent and mantissa bits of a 16-bit float, where they mean
the value times 2^-126 in bf16 and 2^-14 in fp16 (0.5 is subnormal); those of E4M3 codes likewise, times
2^-120 and 2^-8. bf16 tokens are then stored times 2^64. NVFP4 codes are multiplied by their scales, which is
exact. ``magic | code`` is 128 + code in bf16 and 1024 + code in fp16; 8-bit integers are two's complement:
bf16 adds two such numbers, fp16 flips the sign bit.
"""

_E4M3_PAIRS = """
and.b32 {first}, {s}, 0x07F007F0;
shf.l.wrap.b32 t, {s}, {s}, 7;
and.b32 {second}, t, 0x07F007F0;
"""
"""Scales of two groups of 16 columns, rows g in the low half: 2^-120 of their values in bf16."""

_E4M3_RAISED = {
    "bf16": "mov.b32 u, 0x7F007F00;\nmul.rn.bf16x2 {s}, {s}, u;\n",
    "fp16": "shl.b32 {s}, {s}, 3;\nmov.b32 u, 0x78007800;\nmul.rn.f16x2 {s}, {s}, u;\n",
}
"""Those pairs as 2^7 times the scales."""

_BOTH_ROWS = "mov.b32 {{l, h}}, {s};\nmov.b32 m0, {{l, l}};\nmov.b32 m1, {{h, h}};\n"

_E8M0 = """
shl.b32 t, {s}, 23;
and.b32 s00, t, 0x7F800000;
shl.b32 t, {s}, 15;
and.b32 s01, t, 0x7F800000;
shl.b32 t, {s}, 7;
and.b32 s10, t, 0x7F800000;
shr.u32 t, {s}, 1;
and.b32 s11, t, 0x7F800000;
"""

_E8M0_WHOLE = _E8M0 + "".join(f"max.u32 {s}, {s}, 0x00400000;\n" for s in ("s00", "s01", "s10", "s11"))
"""Decodes byte 0 to 2^-127, which is subnormal, where `_E8M0` gives 0."""

_PAIRS = {
    "bf16": "shl.b32 {lo}, {s}, 16;\nand.b32 {hi}, {s}, 0xFFFF0000;\n",
    "fp16": "mov.b32 {{l, h}}, {s};\n"
    "cvt.f32.f16 f, l;\nmov.b32 {lo}, f;\ncvt.f32.f16 f, h;\nmov.b32 {hi}, f;\n",
}
"""Both 16-bit floats of a word as fp32."""

_ZEROS = """
prmt.b32 t, {z}, 0x4B000000, 0x7410;
mov.b32 f, t;
sub.rn.f32 {lo}, {base}, f;
prmt.b32 t, {z}, 0x4B000000, 0x7432;
mov.b32 f, t;
sub.rn.f32 {hi}, {base}, f;
"""
"""Both zero points z of a word as -(offset + z), as 0x4B000000 | z is the fp32 number 2^23 + z."""


def _hex32(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


@dataclass(frozen=True)
class TileAsm:
    """PTX of one tile: adds weights times tokens to the sums of all token blocks.

    Attributes:
        weight, tokens, scale: names of the weight format, the tokens' dtype and the scales' dtype.
        two_groups: two groups of 32 columns, otherwise one scale for all 64.
        zeros: whether there are zero points.
        exact: whether all E8M0 scales are exact, and NaN codes NaN; otherwise contributions of scales below
            2^-64 may become 0.
        blocks: number of 8-token blocks.
    """

    weight: str
    tokens: str
    scale: str
    two_groups: bool
    zeros: bool
    exact: bool
    blocks: int

    @property
    def factor(self) -> int:
        """Factor on the token sums that the tile needs, a pair of 16-bit floats; 0 if it needs no sums."""
        codes = CODES[self.weight, self.tokens]
        return codes.one if self.zeros else codes.symmetric

    @property
    def mma(self) -> str:
        return f"mma.sync.aligned.m16n8k16.row.col.f32.{self.dtype}.{self.dtype}.f32"

    @property
    def dtype(self) -> str:
        return {"bf16": "bf16", "fp16": "f16"}[self.tokens]

    def product(self, d: Sequence[str], a: Sequence[str], b: Sequence[str], c: Sequence[str]) -> str:
        """d = a * b + c on the tensor cores."""
        return self.mma + " " + ", ".join(f"{{{','.join(registers)}}}" for registers in (d, a, b, c)) + ";\n"

    @property
    def scales_weights(self) -> bool:
        """Whether scales multiply weights, otherwise sums."""
        return self.weight == "nvfp4"

    def _scales(self, s: int) -> str:
        if self.scales_weights:
            text = _E4M3_PAIRS.format(s=f"${s}", first="s00", second="s01")
            text += _E4M3_PAIRS.format(s=f"${s + 4}", first="s10", second="s11")
            return text + "".join(_E4M3_RAISED[self.tokens].format(s=name) for name in PAIRS)
        if self.weight in ("mxfp4", "mxfp8"):
            return (_E8M0_WHOLE if self.exact else _E8M0).format(s=f"${s}")
        pair = _PAIRS[self.scale]
        if not self.two_groups:
            return pair.format(s=f"${s}", lo="s00", hi="s10")
        return pair.format(s=f"${s}", lo="s00", hi="s01") + pair.format(s=f"${s + 4}", lo="s10", hi="s11")

    def _zero_points(self, z: int) -> str:
        base = _hex32(2.0**23 - CODES[self.weight, self.tokens].offset)
        if not self.two_groups:
            return _ZEROS.format(z=f"${z}", lo="z00", hi="z10", base=base)
        first = _ZEROS.format(z=f"${z}", lo="z00", hi="z01", base=base)
        return first + _ZEROS.format(z=f"${z + 4}", lo="z10", hi="z11", base=base)

    def _scaled(self, n: int, run: int, sums: list[str]) -> str:
        """Scales the sums of group `run` and adds them to those of token block `n`."""
        text, codes = "", CODES[self.weight, self.tokens]
        for i in FOUR:
            p, to = f"p{n}_{i}", f"${4 * n + i}"
            if self.zeros:
                text += f"fma.rn.f32 {p}, z{i // 2}{run}, {sums[i]}, {p};\n"
            if codes.shift and self.tokens == "bf16" and self.exact:
                text += f"mul.rn.f32 {p}, {p}, {_hex32(2.0**codes.shift)};\n"
            text += f"mov.b32 f, s{i // 2}{run};\nfma.rn.f32 {to}, {p}, f, {to};\n"
        return text

    def __iter__(self):  # type: ignore[no-untyped-def]
        """(PTX, constraints).

        Operands: 4 output sums per block; the code words; two sets of 4 equal scale words, the second for
        rows g + 8 of groups of 32, or for the last two groups of 16; zero-point words likewise, if any; per
        block 4 + 4 words of tokens, 4 input sums, and, if `factor` is not 0, the token sums of each group
        times `factor`, in 4 registers each.
        """
        codes, blocks = CODES[self.weight, self.tokens], range(self.blocks)
        runs = 2 if self.two_groups else 1
        w = 4 * self.blocks
        s = w + 4 * codes.words
        x = s + (16 if self.zeros else 8)
        per_block = 12 + (4 * runs if self.factor else 0)
        text = "{\n.reg .b32 a0, a1, a2, a3, m0, m1, t, u, s00, s01, s10, s11;\n"
        text += ".reg .b16 l, h;\n.reg .f32 f, z, z00, z01, z10, z11;\nmov.f32 z, 0f00000000;\n"
        text += "".join(f".reg .f32 p{n}_{i};\n" for n in blocks for i in FOUR)
        text += self._scales(s) + (self._zero_points(s + 8) if self.zeros else "")
        starts = [(4 * n + i, x + per_block * n + 8 + i) for n in blocks for i in FOUR]
        text += "".join(f"mov.f32 ${output}, ${start};\n" for output, start in starts)
        for run in range(runs):
            steps = range(4 // runs * run, 4 // runs * (run + 1))
            sums = [[f"${x + per_block * n + 12 + 4 * run + i}" for i in FOUR] for n in blocks]
            for j in steps:
                at = w + codes.words * j
                text += _BOTH_ROWS.format(s=PAIRS[j]) if self.scales_weights else ""
                text += codes.text.format(w=f"${at}", v=f"${at + 1}") + (codes.whole if self.exact else "")
                for n in blocks:
                    b = (f"${x + per_block * n + 2 * j}", f"${x + per_block * n + 2 * j + 1}")
                    if self.scales_weights:
                        sum_ = [f"${4 * n + i}" for i in FOUR]
                        text += self.product(sum_, A_REGISTERS, b, sum_)
                        continue
                    p = [f"p{n}_{i}" for i in FOUR]
                    initial = sums[n] if self.factor and not self.zeros else ["z"] * 4
                    text += self.product(p, A_REGISTERS, b, initial if j == steps[0] else p)
            if not self.scales_weights:
                text += "".join(self._scaled(n, run, sums[n]) for n in blocks)
        ins = ["r"] * (x - w) + (["r"] * 8 + ["f"] * (per_block - 8)) * self.blocks
        yield text + "}"
        yield ",".join(["=&f"] * w + ins)


@dataclass(frozen=True)
class SumsAsm:
    """PTX that sums tokens over the columns of one tile, one of up to 8 tiles in flight."""

    tile: TileAsm

    def __iter__(self):  # type: ignore[no-untyped-def]
        """(PTX, constraints).

        Operands: 4 output sums; 4 + 4 words of tokens; 4 copies of the tile's factor in the lanes of one g,
        of 0 in the others; 4 input sums. The lanes of that g get the sums of their two tokens; with groups of
        32 those of the first group, then those of the second.
        """
        d, c = ([f"${i}" for i in FOUR], [f"${16 + i}" for i in FOUR])
        text = "{\n.reg .b32 n;\nmov.b32 n, 0;\n"
        text += "".join(f"mov.f32 {target}, {source};\n" for target, source in zip(d, c, strict=True))
        for j in FOUR:
            low = not self.tile.two_groups or j < 2
            a = ["$12", "n", "$12", "n"] if low else ["n", "$12", "n", "$12"]
            text += self.tile.product(d, a, (f"${4 + 2 * j}", f"${5 + 2 * j}"), d)
        yield text + "}"
        yield ",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4)
