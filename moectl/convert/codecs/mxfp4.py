"""MXFP4: E2M1 codes with one E8M0 scale per 32 weights (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...errors import CheckpointError
from .codec import check_weights, per_group, two_to_a_byte

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the low three bits of a code; bit 3 is the sign."""

_BIAS = 127
_E2M1_MAX_EXPONENT = 2


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """``[256, 2]`` float32: the two values of a byte."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), -1)


@lru_cache(maxsize=8)
def _e8m0(device: torch.device) -> Tensor:
    """``[256]`` float32: 2**(byte - 127), exact from 2**-127 on; byte 255 is NaN."""
    values = [2.0 ** (byte - _BIAS) for byte in range(255)]
    return torch.tensor([*values, float("nan")], device=device)


@dataclass(frozen=True)
class Mxfp4:
    """E2M1 x 2**(scale - 127)."""

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """``[e, n, k]`` float32 from `codes` ``[e, n, k / 2]`` and `scale` ``[e, n, k / 32]``, both uint8.

        Exact, but that 2, 3, 4 and 6 times 2**127 are infinite in float32; scale 255 gives NaN.
        """
        if codes.dtype is not torch.uint8 or scale.dtype is not torch.uint8 or zero is not None:
            raise CheckpointError(
                f"MXFP4 is uint8 codes and scales without zero points, got {codes.dtype}, {scale.dtype}."
            )
        e, n, half = codes.shape
        if scale.shape != (e, n, half * 2 // BLOCK) or half * 2 % BLOCK:
            raise CheckpointError(
                f"MXFP4 codes {list(codes.shape)} need scales {[e, n, half * 2 // BLOCK]}, "
                f"got {list(scale.shape)}."
            )
        values = _pairs(codes.device).index_select(0, codes.reshape(-1).int()).reshape(e, n, -1, BLOCK)
        factors = _e8m0(scale.device).index_select(0, scale.reshape(-1).int()).reshape(e, n, -1, 1)
        return values.mul_(factors).reshape(e, n, half * 2)

    def encode(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Codes ``[e, n, k / 2]`` and scales ``[e, n, k / 32]``, uint8, of finite `weights`.

        The scale is 2**(floor(log2(largest magnitude)) - 2), at least 2**-127 (OCP MX 1.0, 6.3); codes
        round to nearest, ties to even, and saturate at 6.
        """
        check_weights(weights)
        if weights.shape[-1] % BLOCK:
            raise CheckpointError(f"MXFP4 needs rows of whole blocks of {BLOCK}, got {weights.shape[-1]}.")
        blocks = per_group(weights.float(), weights.shape[-1] // BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        exponent = torch.frexp(largest)[1] - 1 - _E2M1_MAX_EXPONENT
        exponent = torch.where(largest == 0, -_BIAS, exponent).clamp(-_BIAS, _BIAS)
        # Powers of two: exact, but for weights so small beside their block that they become zero.
        scaled = blocks * _e8m0(weights.device)[_BIAS - exponent]
        codes = two_to_a_byte(_nearest(scaled).reshape(weights.shape))
        return codes, (exponent + _BIAS).to(torch.uint8).squeeze(-1)


def _nearest(x: Tensor) -> Tensor:
    """E2M1 codes nearest to `x`, ties to the even code, uint8."""
    size = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower in range(len(E2M1) - 1):
        middle = (E2M1[lower] + E2M1[lower + 1]) / 2
        code += (size > middle) if lower % 2 == 0 else (size >= middle)
    return code | (torch.signbit(x).to(torch.uint8) << 3)
