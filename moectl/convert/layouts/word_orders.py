"""Bit orders inside 32-bit words, shared by several layouts.

A table has the input bit for every bit of the result. The input word is four bytes y0..y3 in memory order,
each with two 4-bit codes, the first in the low nibble.
"""

from __future__ import annotations

from ..steps.transforms import Bits, DtypeView


def _nibbles(order: tuple[int, ...]) -> Bits:
    return Bits(tuple(4 * nibble + bit for nibble in order for bit in range(4)))


NIBBLES_APART = _nibbles((0, 2, 4, 6, 1, 3, 5, 7))
"""Low nibbles of the four bytes to the low half word, high nibbles to the high half word."""

NIBBLES_INTERLEAVED = _nibbles((0, 4, 1, 5, 2, 6, 3, 7))
"""The low nibbles of bytes 0 and 2, then their high ones, the low ones of bytes 1 and 3, their high ones."""

SIGNS_INTERLEAVED = Bits(tuple(NIBBLES_INTERLEAVED.order[bit] if bit % 4 == 3 else bit for bit in range(32)))
"""The highest bits of nibbles as `NIBBLES_INTERLEAVED` places them, their other bits in place."""


def _e2m1_shifted() -> Bits:
    """E2M1 codes at positions from which a shift and one mask convert them to bf16.

    Low nibbles go to the low half word, high nibbles to the high one. In a half, byte j = 0, 1, 2
    gives ``(sign << 15 | exponent_mantissa << 6) >> 3j``; byte 3 gets the remaining bits: ``sign << 14 |
    exponent << 10 | mantissa << 13``. Codes are s e e m from the highest bit.
    """
    mantissa, exponent, sign = 0, (1, 2), 3
    order = [-1] * 32
    for half in range(2):
        for byte in range(4):
            source, base = 8 * byte + 4 * half, 16 * half
            if byte < 3:
                positions = {mantissa: 6, exponent[0]: 7, exponent[1]: 8, sign: 15}
                shift = 3 * byte
            else:
                positions = {mantissa: 13, exponent[0]: 10, exponent[1]: 11, sign: 14}
                shift = 0
            for bit, position in positions.items():
                order[base + position - shift] = source + bit
    return Bits(tuple(order))


E2M1_SHIFTED = _e2m1_shifted()


def _e2m1_rotated() -> Bits:
    """E2M1 codes at positions from which a rotation and one mask convert them to bf16.

    Byte r holds register r of a word; its low nibble is the low half's code and its high one the
    high half's. With m = 0x81C081C0 (sign, two exponent bits and mantissa of a bf16 of 2**-126 the value),
    register 0 is ``x & m``, 1 ``rotr(x, 4) & m``, 2 ``(x << 6) & m``, and 3 ``(rotr(x, 6) & 0x81808180) |
    ((x << 2) & 0x00400040)``.
    """
    order = [-1] * 32
    for byte, positions in enumerate(_ROTATED):
        for half, bits in enumerate(positions):
            for bit, position in zip((3, 2, 1, 0), bits, strict=True):
                order[position] = 8 * byte + 4 * half + bit
    return Bits(tuple(order))


_ROTATED = (
    ((15, 8, 7, 6), (31, 24, 23, 22)),
    ((19, 12, 11, 10), (3, 28, 27, 26)),
    ((9, 2, 1, 0), (25, 18, 17, 16)),
    ((21, 14, 13, 4), (5, 30, 29, 20)),
)
"""Bit positions of sign, exponent and mantissa by register and half."""

E2M1_ROTATED = _e2m1_rotated()


def _e4m3_pairs() -> Bits:
    """Four E4M3 bytes at positions from which one mask, or a rotation and it, convert them to bf16.

    With m = 0x07F007F0, bytes 0 and 2 are the low and the high half of ``x & m``, bytes 1 and 3 of
    ``rotl(x, 7) & m``: 2**-120 of the values. Sign bits, which are 0, are at bits 11, 12, 27 and 28.
    """
    order = [-1] * 32
    for byte, (first, sign) in enumerate(((4, 11), (29, 12), (20, 27), (13, 28))):
        for bit in range(7):
            order[(first + bit) % 32] = 8 * byte + bit
        order[sign] = 8 * byte + 7
    return Bits(tuple(order))


E4M3_PAIRS = _e4m3_pairs()

WORDS = DtypeView("U8", "I32")
BYTES = DtypeView("I32", "U8")
