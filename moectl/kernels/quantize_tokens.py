"""Quantization of activations for experts that do not take 16-bit tokens, and dequantization."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NoBackend, UsageError
from ..problem.number_formats import E2M1, E4M3, INT8, NUMBER_FORMATS, NumberFormat
from ..problem.schemes import FULL, ActFormat


@dataclass(frozen=True, slots=True)
class QuantizedTokens:
    """Quantized tokens, the input of an experts kernel.

    Attributes:
        values: ``[tokens, hidden]`` codes, or ``[tokens, hidden // 2]`` bytes of two 4-bit codes.
        scales: one per block of `format`, in the order that the kernel reads.
        format: number format and block shape.
    """

    values: Tensor
    scales: Tensor
    format: ActFormat

    def __len__(self) -> int:
        return len(self.values)


SMALLEST_E4M3 = 2.0**-9
TINY = torch.finfo(torch.float32).tiny

TILE_ROWS, TILE_COLUMNS = 128, 4
"""Rows and columns of a tile of scales (tensor cores of SM100, CUTLASS)."""

Coded = tuple[Tensor, Tensor]
"""Codes of blocks ``[tokens, blocks, block]``, and their scales ``[tokens, blocks]``."""


def quantize(x: Tensor, form: ActFormat, global_scale: Tensor | None = None) -> QuantizedTokens:
    """`x` ``[tokens, hidden]`` as `form`, nearest with ties to even, saturating; scales ``[tokens, blocks]``.

    Args:
        form: ``fp8`` per token, per block of a token, or with one static scale, dynamic ones perhaps rounded
            up to powers of two; ``int8`` likewise, but never rounded; ``mxfp8``; ``mxfp4``; ``nvfp4``; any
            other whose codes and scales are a row of `QUANTIZERS`.
        global_scale: one number in a tensor on x's device by which decoded values are multiplied last: the
            second level of a two-level format (None is 1), or the scale of a static format (required).

    Raises:
        NoBackend: no quantizer for `form`.
        UsageError: `hidden` is not a multiple of the block, or a global scale is missing or not expected.

    Example:
        >>> from moectl.problem.schemes import MXFP8_ACT
        >>> tokens = quantize(torch.ones(2, 64), MXFP8_ACT)
        >>> tuple(tokens.values.shape), tuple(tokens.scales.shape)
        ((2, 64), (2, 2))
    """
    reason = refusal(form, x.shape[-1])
    if reason:
        raise NoBackend(f"tokens cannot be quantized to {form}: {reason}")
    if not form.dynamic and global_scale is None:
        raise UsageError(f"tokens in {form} need the layer's scale of inputs, got none")
    if global_scale is not None and form.dynamic and not form.number.global_scale:
        raise UsageError(f"tokens in {form} have no scale of the whole layer, got one")
    block = x.shape[-1] if form.block[1] == FULL else form.block[1]
    blocks = _split(x.float(), block)
    quantizer = _fp8_by_powers if form.rounds_scales else QUANTIZERS[_coding(form.number)]
    codes, scales = quantizer(blocks, global_scale)
    return QuantizedTokens(codes.flatten(-2), scales, form)


def refusal(form: ActFormat, hidden: int) -> str:
    """Why tokens of `hidden` columns cannot be quantized to `form`, a clause; empty when they can."""
    if not _is_known(form):
        return f"there are quantizers to {_known()}"
    rows, columns = form.block
    static = (FULL, FULL)
    if (form.block == static) == form.dynamic or (rows != 1 and form.block != static):
        return "dynamic scales are of one token or of its blocks, static ones of everything"
    if form.bits == 4 and columns == FULL:
        return "4-bit codes have scales by block"
    if columns != FULL and hidden % columns:
        return f"{hidden} columns are no whole number of blocks of {columns}"
    return ""


def _fp8(blocks: Tensor, scale: Tensor | None) -> Coded:
    """E4M3 codes with an fp32 scale that maps a block's largest magnitude to E4M3's."""
    scales = _float_scales(blocks, scale, E4M3.largest)
    return _e4m3(blocks / scales.unsqueeze(-1)), scales


def _fp8_by_powers(blocks: Tensor, scale: Tensor | None) -> Coded:
    """`_fp8` with each scale rounded up to a power of two; infinities and NaN stay what they are."""
    scales = _float_scales(blocks, scale, E4M3.largest)
    # A mantissa other than zero carries into the exponent.
    powers = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scales = torch.where(scales.isfinite(), powers, scales)
    return _e4m3(blocks / scales.unsqueeze(-1)), scales


def _int8(blocks: Tensor, scale: Tensor | None) -> Coded:
    """Codes from -127 to 127 with an fp32 scale that maps a block's largest magnitude to 127."""
    scales = _float_scales(blocks, scale, INT8.largest)
    codes = (blocks / scales.unsqueeze(-1)).round().clamp(-INT8.largest, INT8.largest)
    return codes.to(torch.int8), scales


def _float_scales(blocks: Tensor, scale: Tensor | None, largest: float) -> Tensor:
    """``[tokens, blocks]`` fp32: the one `scale` for all, else of each block's own largest magnitude."""
    if scale is None:
        return _quotient(blocks.abs().amax(-1), largest).clamp(min=TINY)
    return scale.float().reshape(1, 1).expand(len(blocks), 1).contiguous()


def _mxfp8(blocks: Tensor, scale: Tensor | None) -> Coded:
    """E4M3 codes with the smallest E8M0 scale (uint8) with which none saturates (NVIDIA's rule)."""
    fraction, exponent = torch.frexp(_quotient(blocks.abs().amax(-1), E4M3.largest))
    # frexp's fraction is in [0.5, 1): exactly 0.5 is a power of two, anything above is rounded up.
    power = (exponent - 1 + (fraction > 0.5).int() + 127).clamp(1, 253)
    inverse = ((254 - power) << 23).view(torch.float32)
    return _e4m3(blocks * inverse.unsqueeze(-1)), power.to(torch.uint8)


def _nvfp4(blocks: Tensor, scale: Tensor | None) -> Coded:
    """E2M1 codes, two to a byte with the even column low, with E4M3 block scales and a global scale."""
    if scale is not None:
        blocks = blocks / scale.float().reshape(1, 1, 1)
    exact = _quotient(blocks.abs().amax(-1), E2M1.largest).clamp(SMALLEST_E4M3, E4M3.largest)
    scales = exact.to(torch.float8_e4m3fn)
    codes = _e2m1(blocks / scales.float().unsqueeze(-1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales.view(torch.uint8)


def _mxfp4(blocks: Tensor, scale: Tensor | None) -> Coded:
    """E2M1 codes, two to a byte, with an E8M0 scale from the largest magnitude rounded to E2M1's mantissa.

    As in Quark and llm-compressor: a magnitude that rounds to 8 times a power of two gets the larger scale.
    """
    half = 1 << 21  # half of E2M1's one mantissa bit, in the bits of a float
    bits = blocks.abs().amax(-1).clamp(max=2.0**127).view(torch.int32) + half
    power = ((bits >> 23) - 2).clamp(1, 253)
    inverse = ((254 - power) << 23).view(torch.float32)
    codes = _e2m1(blocks * inverse.unsqueeze(-1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), power.to(torch.uint8)


Coding = tuple[str, str]
"""`CodeGrid.name` and `NumberFormat.byte_scale` of a format."""

QUANTIZERS: dict[Coding, Callable[[Tensor, Tensor | None], Coded]] = {
    ("E4M3", ""): _fp8,
    ("E4M3", "E8M0"): _mxfp8,
    ("E2M1", "E8M0"): _mxfp4,
    ("E2M1", "F8_E4M3"): _nvfp4,
    ("INT8", ""): _int8,
}
"""Quantizers of blocks ``[tokens, blocks, block]`` to codes and scales, by `Coding`."""


def _coding(number: NumberFormat) -> Coding:
    return number.grid.name, number.byte_scale


def _is_known(form: ActFormat) -> bool:
    return form.name in NUMBER_FORMATS and _coding(form.number) in QUANTIZERS


def _known() -> str:
    return ", ".join(name for name, number in NUMBER_FORMATS.items() if _coding(number) in QUANTIZERS)


def _split(t: Tensor, block: int) -> Tensor:
    """``[..., blocks, block]`` of `t` ``[..., blocks * block]``."""
    return t.reshape(*t.shape[:-1], t.shape[-1] // block, block)


def _quotient(x: Tensor, number: float) -> Tensor:
    """`x` / `number`, rounded once: for a Python number a GPU multiplies by its rounded reciprocal."""
    return x / torch.full_like(x, number)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)


def _e2m1(x: Tensor) -> Tensor:
    """Codes of E2M1, one to a byte: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code."""
    size = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for middle in (0.25, 1.25, 2.5, 5.0):
        code += size > middle
    for middle in (0.75, 1.75, 3.5):
        code += size >= middle
    return code


def dequantize(tokens: QuantizedTokens, global_scale: Tensor | None = None) -> Tensor:
    """``[tokens, hidden]`` fp32 values of `tokens` with scales row by row (not tiled).

    Exact for MXFP8; otherwise one rounding to fp32 per factor, as in the codec of the same weight format.
    """
    form = tokens.format
    if not _is_known(form):
        raise NoBackend(f"tokens in {form} cannot be decoded: there are decoders of {_known()}")
    grid, scale = _coding(form.number)
    values, scales = VALUES[grid](tokens.values), SCALES[scale](tokens.scales)
    decoded = _split(values, values.shape[-1] // scales.shape[-1]).mul(scales.unsqueeze(-1)).flatten(-2)
    return decoded if global_scale is None or not form.dynamic else decoded * global_scale.float().reshape(())


def _from_e2m1(packed: Tensor) -> Tensor:
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    field, half = (codes >> 1) & 3, (codes & 1).float() / 2
    # 2**(field - 1) as the bits of a float; a field of zero has no leading one.
    power = ((field.clamp(min=1) - 1 + 127) << 23).view(torch.float32)
    size = torch.where(field == 0, half, (1 + half) * power)
    return torch.where(codes > 7, -size, size)


def _from_e8m0(scales: Tensor) -> Tensor:
    return (scales.int() << 23).view(torch.float32)


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "E4M3": lambda codes: codes.float(),
    "E2M1": _from_e2m1,
    "INT8": lambda codes: codes.float(),
}
"""Float32 values of codes by `CodeGrid.name`."""

SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda scales: scales,
    "E8M0": _from_e8m0,
    "F8_E4M3": lambda scales: scales.view(torch.float8_e4m3fn).float(),
}
"""Float32 values of scales by `NumberFormat.byte_scale`."""


def in_tiles(scales: Tensor) -> Tensor:
    """`scales` ``[..., tokens, blocks]`` in tiles of 128 x 4, both sizes rounded up and padded with zeros.

    The shape is that of the padded scales. In memory tiles are row-major; a tile has, for j from 0 to 31,
    four bytes each of the tokens j, j + 32, j + 64 and j + 96.
    """
    *lead, rows, columns = scales.shape
    down, across = math.ceil(rows / TILE_ROWS), math.ceil(columns / TILE_COLUMNS)
    full = (down * TILE_ROWS, across * TILE_COLUMNS)
    padded = torch.nn.functional.pad(scales, (0, full[1] - columns, 0, full[0] - rows))
    tiles = padded.reshape(math.prod(lead), down, 4, 32, across, TILE_COLUMNS).permute(0, 1, 4, 3, 2, 5)
    return tiles.reshape(*lead, *full)
