"""The codec of every quantized weight format: values of a grid times the scale of their block."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import CheckpointError
from ...lazy_torch import Tensor, torch
from ...problem.schemes import WeightFormat
from .blocks import WITHIN, ScaleBlocks, blocks_of, over
from .codec import Encoded, check_weights
from .grids import E4M3, IntegerGrid, ValueGrid, packed, unpacked, values_of
from .scales import E8M0, TINY, E4M3Scale, ScaleStore, quotient


@dataclass(frozen=True)
class Scaled:
    """value = (grid value of the code - grid value of the zero point) x scale [x global scale].

    Attributes:
        weight: the format: its blocks, and whether zero points are stored.
        grid: the values of codes.
        store: how scales are stored when encoding; decoding accepts any float dtype if it is a float.
        two_level: True with a global scale (NVFP4).
    """

    weight: WeightFormat
    grid: ValueGrid
    store: ScaleStore
    two_level: bool = False

    def decode(
        self,
        codes: Tensor,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Tensor:
        """``[e, n, k]`` float32; one rounding, to float32, per factor that is not a power of two.

        The product of an E2M1 code and an E4M3 scale is exact, so NVFP4 also rounds once. Values beyond
        float32 become infinite; NaN codes and scales give NaN. CheckpointError when dtypes or shapes do not
        match.
        """
        blocks = self._check(codes, scale, zero, global_scale)
        assert scale is not None
        values = blocks.split(unpacked(self.grid, codes))
        if zero is not None:
            values = values.sub_(over(self.shift(zero)))
        values = values.mul_(over(self._store_of(scale).load(scale)))
        decoded = blocks.join(values)
        return decoded if global_scale is None else decoded.mul_(_rows(global_scale, blocks.n))

    def encode(self, weights: Tensor) -> Encoded:
        """The usual scales of finite `weights` ``[e, n, k]`` and the codes nearest to weight / scale.

        Scales map the largest magnitude of a block to the grid's largest value (E8M0: by the rule of
        `store`); with zero points, the range of the block, extended to zero, to all codes. Ties go to even
        codes; values beyond the grid saturate.
        """
        check_weights(weights)
        blocks = self.blocks(weights)
        w = blocks.split(weights.float())
        global_scale = self.global_scale(w.abs().amax(dim=(1, 2, 3, 4))) if self.two_level else None
        if global_scale is not None:
            w = w / global_scale[..., None, None]
        scale, zero = self.usual_scales(w)
        return Encoded(self.pack(blocks, self.codes(w, scale, zero)), scale, zero, global_scale)

    def blocks(self, weights: Tensor) -> ScaleBlocks:
        """The blocks of `weights` ``[e, n, k]``; CheckpointError when they are not whole."""
        return blocks_of(self.weight, weights.shape[1], weights.shape[2])

    def global_scale(self, largest: Tensor) -> Tensor:
        """``[e, 1, 1]`` float32: maps the `largest` magnitude ``[e]`` to the largest code and block scale."""
        scale = quotient(largest, self.grid.largest * E4M3.largest).clamp(min=TINY)
        return torch.where(largest == 0, 1.0, scale)[:, None, None]

    def usual_scales(self, w: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stored scales of blocked `w` (global scale divided out) by the format's rule, and zero points."""
        low, high = w.amin(WITHIN), w.amax(WITHIN)
        if not self.weight.zero_point:
            return self.store.covering(torch.maximum(high, -low), self.grid), None
        last = (1 << self.grid.bits) - 1
        low, high = low.clamp_(max=0), high.clamp_(min=0)
        scale = self.store.store(quotient(high, last) - quotient(low, last))
        zero = (low / self.store.load(scale)).round_().neg_().clamp_(0, last)
        return scale, zero.to(torch.uint8)

    def shift(self, zero: Tensor) -> Tensor:
        """Float32 grid values of the zero points `zero`."""
        if not isinstance(self.grid, IntegerGrid):
            raise CheckpointError(f"{self.weight} has no zero points.")
        return zero.float().sub_(self.grid.offset)

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Uint8 codes, one per byte, nearest to blocked `w` (global scale divided out) at stored scales.

        The quotient is rounded to float32 before it is rounded to the grid.
        """
        return self.grid.codes(self.scaled(w, scale, zero))

    def rounded(self, w: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Blocked float32: the decoded values of `codes` of blocked `w`, without the global scale."""
        return self._unscaled(self.grid.round(self.scaled(w, scale, zero)), scale, zero)

    def valued(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Blocked float32: the decoded values of blocked `codes`, one per byte, without the global scale."""
        return self._unscaled(values_of(self.grid, codes), scale, zero)

    def _unscaled(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        if zero is not None:
            x.sub_(over(self.shift(zero)))
        return x.mul_(over(self.store.load(scale)))

    def scaled(self, w: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Blocked `w` in units of the grid."""
        x = w / over(self.store.load(scale))
        return x if zero is None else x.add_(over(self.shift(zero)))

    def pack(self, blocks: ScaleBlocks, codes: Tensor) -> Tensor:
        """Canonical (packed) codes from blocked ones."""
        return packed(self.grid, blocks.join(codes))

    def _store_of(self, scale: Tensor) -> ScaleStore:
        """The store that `scale` is in: float scales of float grids may be E8M0 bytes instead."""
        return E8M0() if scale.dtype is torch.uint8 and not isinstance(self.store, E4M3Scale) else self.store

    def _check(
        self, codes: Tensor, scale: Tensor | None, zero: Tensor | None, global_scale: Tensor | None
    ) -> ScaleBlocks:
        bytes_wanted = self.store.dtype is torch.uint8
        may_be_bytes = not isinstance(self.grid, IntegerGrid)
        if (
            codes.dtype is not torch.uint8
            or scale is None
            or (bytes_wanted and scale.dtype is not torch.uint8)
            or not (scale.is_floating_point() or (may_be_bytes and scale.dtype is torch.uint8))
        ):
            kind = "uint8" if bytes_wanted else "float"
            got = "none" if scale is None else scale.dtype
            raise CheckpointError(
                f"{self.weight} is uint8 codes and {kind} scales, got {codes.dtype}, {got}."
            )
        if zero is not None and not isinstance(self.grid, IntegerGrid):
            raise CheckpointError(f"{self.weight} has no zero points, got some.")
        e, n, m = codes.shape
        blocks = blocks_of(self.weight, n, m * 8 // self.grid.bits, scale.shape[1])
        expected = (e, *blocks.scales)
        if tuple(scale.shape) != expected or (zero is not None and tuple(zero.shape) != expected):
            raise CheckpointError(
                f"{self.weight} codes for {[e, n, blocks.k]} weights need scales (and zeros) "
                f"{list(expected)}, got {list(scale.shape)}."
            )
        if (global_scale is None) is self.two_level:
            had = "needs a global scale, got none" if self.two_level else "has no global scale, got one"
            raise CheckpointError(f"{self.weight} {had}.")
        if global_scale is not None and (
            global_scale.ndim != 3
            or global_scale.shape[0] != e
            or global_scale.shape[2] != 1
            or not global_scale.shape[1]
            or n % global_scale.shape[1]
        ):
            raise CheckpointError(
                f"{self.weight} needs global scales [{e}, parts of {n} rows, 1], "
                f"got {list(global_scale.shape)}."
            )
        return blocks


def _rows(global_scale: Tensor, n: int) -> Tensor:
    """``[e, n, 1]`` (or ``[e, 1, 1]``) float32: the global scale of every row."""
    parts = global_scale.shape[1]
    return global_scale.float() if parts == 1 else global_scale.float().repeat_interleave(n // parts, 1)
