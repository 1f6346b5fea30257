"""Packed symmetric and asymmetric integers of 4 or 8 bits, with a float scale per group or channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...schemes import FULL, WeightFormat
from ..transforms import DTYPES
from .codec import check_weights, low_nibbles_first, per_group, two_to_a_byte


@dataclass(frozen=True)
class PackedInt:
    """(code - zero) x scale, with offset codes: zero is ``2**(bits - 1)`` unless it is stored."""

    weight: WeightFormat

    @property
    def offset(self) -> int:
        """The code of zero in a symmetric format."""
        return 1 << (self.weight.bits - 1)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """``[e, n, k]`` float32 from uint8 `codes` ``[e, n, k * bits / 8]`` and float `scale` ``[e, n, g]``.

        `zero` ``[e, n, g]`` holds unpacked codes of zero. The product is rounded once, to float32.
        """
        if codes.dtype is not torch.uint8 or not scale.is_floating_point():
            raise CheckpointError(
                f"{self.weight} is uint8 codes and float scales, got {codes.dtype}, {scale.dtype}."
            )
        unpacked = low_nibbles_first(codes) if self.weight.bits == 4 else codes
        e, n, k = unpacked.shape
        expected = (e, n, self._groups(k))
        if tuple(scale.shape) != expected or (zero is not None and tuple(zero.shape) != expected):
            raise CheckpointError(
                f"{self.weight} codes for {[e, n, k]} weights need scales (and zeros) {list(expected)}, "
                f"got {list(scale.shape)}."
            )
        origin = self.offset if zero is None else zero.float().unsqueeze(-1)
        values = per_group(unpacked.float(), expected[-1]).sub_(origin)
        return values.mul_(scale.float().unsqueeze(-1)).reshape(e, n, k)

    def encode(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Codes ``[e, n, k * bits / 8]`` uint8 and scales ``[e, n, g]`` of finite `weights`, symmetric.

        The scale is the largest magnitude of the group divided by ``2**(bits - 1) - 1/2`` (7.5 for
        4 bits), so that both ends are off by at most half a step; it is rounded to the format's scale
        dtype first (not below the smallest normal, not above the largest finite), and codes are
        nearest to that, ties to even, clamped to their range.
        """
        check_weights(weights)
        dtype = DTYPES.get(self.weight.scale_dtype or "BF16", torch.bfloat16)
        limits = torch.finfo(dtype)
        blocks = per_group(weights.float(), self._groups(weights.shape[-1]))
        largest = blocks.abs().amax(-1) / (self.offset - 0.5)
        scale = largest.clamp(limits.tiny, limits.max).to(dtype)
        steps = (blocks.double() / scale.double().unsqueeze(-1)).round_()
        codes = steps.clamp_(-self.offset, self.offset - 1).add_(self.offset).to(torch.uint8)
        codes = codes.reshape(weights.shape)
        return (two_to_a_byte(codes) if self.weight.bits == 4 else codes), scale

    def _groups(self, k: int) -> int:
        group = k if self.weight.group == FULL else self.weight.group
        if k == 0 or k % group or k * self.weight.bits % 8:
            raise CheckpointError(f"{self.weight} needs rows of whole groups and bytes, got {k} weights.")
        return k // group
