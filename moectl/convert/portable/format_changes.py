"""Changes of weight format, matrix by matrix; exact where the values allow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...errors import UsageError
from ...lazy_torch import Tensor, torch
from ...problem.schemes import FULL, WeightFormat
from ..codecs import Encoded, decode_role, from_halves, in_halves
from ..codecs.grids import E2M1, E4M3, unpacked
from ..codecs.scales import E8M0, E8M0_BIAS
from ..quantize import Quantizer, quantize
from ..steps.transforms import DTYPES
from ..steps.value_steps import Tensors
from .calibration_activations import Activations
from .cost import Cost


@dataclass(frozen=True)
class ExpertMatrix:
    """A matrix of a batch of experts.

    Attributes:
        role: canonical role of the codes, ``w13`` or ``w2``.
        halves: number of equal parts of its rows with separate blocks.
        first: number of the batch's first expert.
    """

    role: str
    halves: int = 1
    first: int = 0


class FormatChange(Protocol):
    """Converts the canonical tensors of a matrix from one format to another."""

    @property
    def kind(self) -> str:
        """``repacked``, ``decoded`` or ``quantized``."""

    @property
    def working_bytes(self) -> float:
        """Bytes of working memory per weight."""

    def apply(self, batch: Tensors, matrix: ExpertMatrix) -> tuple[dict[str, Tensor], Cost]:
        """The new tensors by role, and the cost; UsageError if values would be rounded without permission."""


@dataclass(frozen=True)
class SameFormat:
    """The same format with equal or smaller blocks: no value changes."""

    source: WeightFormat
    target: WeightFormat
    kind = "repacked"
    working_bytes = 2.0

    def apply(self, batch: Tensors, matrix: ExpertMatrix) -> tuple[dict[str, Tensor], Cost]:
        encoded = Encoded.of(batch, matrix.role)
        if self.source.block != self.target.block:
            encoded = from_halves(self._finer(in_halves(encoded, matrix.halves)), matrix.halves)
        scale = encoded.scale
        if scale is not None and scale.dtype is torch.uint8 and self.target.scale_dtype in DTYPES:
            encoded = encoded._replace(scale=E8M0().load(scale).to(DTYPES[self.target.scale_dtype]))
        weights = encoded.codes.numel() * 8 // min(self.source.bits, 8)
        return encoded.roles(matrix.role), Cost(self.kind, "weights", weights, weights)

    def _finer(self, encoded: Encoded) -> Encoded:
        n, k = encoded.codes.shape[1], encoded.codes.shape[2] * 8 // self.source.bits

        def refined(t: Tensor | None) -> Tensor | None:
            for axis, size in ((0, n), (1, k)):
                old, new = (_extent(weight, axis, size) for weight in (self.source, self.target))
                if t is not None and old != new:
                    t = t.index_select(axis + 1, torch.arange(0, size, new, device=t.device) // old)
            return t

        return encoded._replace(scale=refined(encoded.scale), zero=refined(encoded.zero))


@dataclass(frozen=True)
class WidenedIntegers:
    """4-bit integers widened to 8 bits, with the same scales and blocks."""

    source: WeightFormat
    kind = "repacked"
    working_bytes = 3.0
    SHIFT = (1 << 7) - (1 << 3)

    def apply(self, batch: Tensors, matrix: ExpertMatrix) -> tuple[dict[str, Tensor], Cost]:
        encoded = Encoded.of(batch, matrix.role)
        codes = torch.stack((encoded.codes & 15, encoded.codes >> 4), -1).flatten(-2).add_(self.SHIFT)
        zero = None if encoded.zero is None else encoded.zero + self.SHIFT
        roles = encoded._replace(codes=codes, zero=zero).roles(matrix.role)
        return roles, Cost(self.kind, "weights", codes.numel(), codes.numel())


@dataclass(frozen=True)
class Mxfp4ToNvfp4:
    """MXFP4 to NVFP4: the same codes, with power-of-two E4M3 scales under a global scale for each expert.

    A block scale 2**s becomes 2**(s - g) x 2**g with g = (largest s of the expert's matrix) - 8, so that
    blocks down to 2**17 below the largest keep their values, as do smaller ones whose codes are multiples of
    the remaining step. Gate and up share the global scale, since engines take one for both.
    """

    requantize: bool = False
    kind = "repacked"
    working_bytes = 6.0
    LARGEST, SMALLEST = 8, -9

    def apply(self, batch: Tensors, matrix: ExpertMatrix) -> tuple[dict[str, Tensor], Cost]:
        encoded = Encoded.of(batch, matrix.role)
        assert encoded.scale is not None
        codes, scale = encoded.codes, encoded.scale
        e, n, groups = scale.shape
        blocks = codes.reshape(e, n, groups, -1)
        used = ((blocks & 0x77) != 0).any(-1)
        power = scale.int() - E8M0_BIAS
        top = torch.where(used, power, -E8M0_BIAS).amax((1, 2), keepdim=True)
        base = (top - self.LARGEST).clamp(min=-126)
        local = power - base
        small = used & (local < self.SMALLEST)
        exact = scale.numel()
        if bool(small.any()):
            blocks, changed = self._nearest(blocks, local, small)
            exact -= changed
        local = torch.where(used, local, 0).clamp(self.SMALLEST, self.LARGEST)
        factor = E4M3.codes(torch.exp2(local.float())).repeat_interleave(2, dim=2)
        wide = torch.exp2(base.double()).float().expand(-1, matrix.halves, 1).contiguous()
        if exact < scale.numel() and not self.requantize:
            raise UsageError(
                f"{scale.numel() - exact} of {scale.numel()} blocks of {matrix.role} of experts from "
                f"{matrix.first} are too small next to the largest for NVFP4's scales and would lose bits.",
                hint="Give --requantize to round them, and --resume to continue.",
            )
        roles = Encoded(blocks.reshape(codes.shape), factor, None, wide).roles(matrix.role)
        return roles, Cost(self.kind, "blocks", scale.numel(), exact)

    def _nearest(self, blocks: Tensor, local: Tensor, small: Tensor) -> tuple[Tensor, int]:
        """The codes under the raised scales of `small` blocks, and how many blocks changed their values."""
        shrink = torch.exp2((local[small] - self.SMALLEST).float())[:, None]
        values = unpacked(E2M1, blocks[small]) * shrink
        codes = E2M1.codes(values.clone())
        rescaled = blocks.clone()
        rescaled[small] = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return rescaled, int((unpacked(E2M1, rescaled[small]) != values).any(-1).sum())


@dataclass(frozen=True)
class Decoded:
    """Weights in the model's 16-bit dtype; with `rounds`, values that it cannot hold are rounded."""

    source: WeightFormat
    dtype: str
    rounds: bool
    kind = "decoded"
    working_bytes = 20.0

    def apply(self, batch: Tensors, matrix: ExpertMatrix) -> tuple[dict[str, Tensor], Cost]:
        weights = decode_role(self.source, batch, matrix.role, matrix.halves)
        dtype = DTYPES[self.dtype]
        largest = torch.finfo(dtype).max
        rounded = weights.clamp(-largest, largest).to(dtype)
        exact = int((rounded.float() == weights).sum())
        if exact < weights.numel() and not self.rounds:
            raise UsageError(
                f"{weights.numel() - exact} of {weights.numel()} weights of {matrix.role} of experts from "
                f"{matrix.first} are not representable in {self.dtype}.",
                hint="Give --requantize to round them, and --resume to continue.",
            )
        return {matrix.role: rounded}, Cost(self.kind, "weights", weights.numel(), exact)


@dataclass(frozen=True)
class Requantized:
    """Decodes weights and quantizes them again."""

    source: WeightFormat
    quantizer: Quantizer
    activations: Activations | None = None
    w13_halves: int = 1
    kind = "quantized"

    @property
    def working_bytes(self) -> float:
        return 30.0 if self.activations is None else 60.0

    def apply(self, batch: Tensors, matrix: ExpertMatrix) -> tuple[dict[str, Tensor], Cost]:
        weights = decode_role(self.source, batch, matrix.role, matrix.halves)
        hessian = None
        if self.activations is not None:
            hessian = self.activations.hessians(
                batch, matrix.role, matrix.first, self.source, self.w13_halves
            )
        # Engines take one global scale for gate and up.
        shared = self.quantizer.weight.number.global_scale
        quantized = quantize(
            weights,
            self.quantizer,
            matrix.role,
            halves=1 if shared else matrix.halves,
            hessian=hessian,
            first_expert=matrix.first,
        )
        roles = dict(quantized.roles)
        if shared:
            name = f"{matrix.role}_global"
            roles[name] = roles[name].expand(-1, matrix.halves, 1).contiguous()
        return roles, Cost(self.kind, "weights", weights.numel(), 0, quantized.report)


def _extent(weight: WeightFormat, axis: int, size: int) -> int:
    """Rows (`axis` 0) or columns of a block in a matrix of `size` rows or columns."""
    return size if weight.block[axis] == FULL else weight.block[axis]


def refines(source: WeightFormat, target: WeightFormat, n: int, k: int) -> bool:
    """True if every block of `target` in a matrix ``[n, k]`` is contained in one block of `source`."""
    if (0, 0) in (source.block, target.block):
        return source.block == target.block
    for axis, size in ((0, n), (1, k)):
        old, new = _extent(source, axis, size), _extent(target, axis, size)
        if old < size and old % new:
            return False
    return True
