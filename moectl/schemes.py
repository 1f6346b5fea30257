"""Number formats of expert weights and activations, as values that compare."""

from __future__ import annotations

from dataclasses import dataclass, field

FULL = -1
"""In a block shape: the whole extent of that axis shares one scale."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How an expert weight matrix `[out, in]` is stored.

    Attributes:
        name: ``bf16``, ``fp8``, ``mxfp8``, ``nvfp4``, ``mxfp4``, ``int8`` or ``int4``.
        bits: bits per weight, scales not counted.
        block: (rows, columns) that share one scale; `FULL` is the whole axis, so ``(1, 32)`` is
            group 32 along the reduction axis, ``(1, FULL)`` per output channel, ``(FULL, FULL)``
            per tensor; ``(0, 0)`` means that there is no scale.
        scale_dtype: safetensors dtype of the scales (``E8M0`` for MX formats). Storage only: two
            formats that differ in nothing else are equal, as engines cast it to the model's dtype.
        zero_point: True when codes are unsigned with a stored zero per block (asymmetric).
    """

    name: str
    bits: int
    block: tuple[int, int] = (0, 0)
    scale_dtype: str = field(default="", compare=False)
    zero_point: bool = False

    @property
    def group(self) -> int:
        """Weights along the reduction axis that share a scale; `FULL` for the whole axis."""
        return self.block[1]

    def __str__(self) -> str:
        rows, columns = self.block
        if self.block == (0, 0):
            shape = ""
        elif self.block == (FULL, FULL):
            shape = " per tensor"
        elif columns == FULL:
            shape = " per channel"
        elif rows == 1:
            shape = f" group {columns}"
        else:
            shape = f" block {rows}x{columns}"
        return f"{self.name}{shape}{' with zero points' if self.zero_point else ''}"


@dataclass(frozen=True, slots=True)
class ActFormat:
    """How activations enter the expert GEMMs.

    Attributes:
        name: ``a16`` (the model's 16-bit dtype), ``fp8``, ``mxfp8``, ``mxfp4``, ``nvfp4``, ``int8``.
        bits: bits per value.
        block: as in `WeightFormat`, over ``[tokens, features]``.
        dynamic: True when scales are computed at run time.
    """

    name: str = "a16"
    bits: int = 16
    block: tuple[int, int] = (0, 0)
    dynamic: bool = True

    def __str__(self) -> str:
        return self.name if self.name == "a16" else f"{self.name} {'dynamic' if self.dynamic else 'static'}"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A weight format with the activation format the checkpoint declares for it."""

    weight: WeightFormat
    act: ActFormat = ActFormat()

    def __str__(self) -> str:
        return f"{self.weight}, {self.act} activations"


A16 = ActFormat()
BF16 = WeightFormat("bf16", 16)
MXFP4 = WeightFormat("mxfp4", 4, (1, 32), "E8M0")
NVFP4 = WeightFormat("nvfp4", 4, (1, 16), "F8_E4M3")
MXFP8 = WeightFormat("mxfp8", 8, (1, 32), "E8M0")
FP8_TENSOR = WeightFormat("fp8", 8, (FULL, FULL), "F32")
FP8_CHANNEL = WeightFormat("fp8", 8, (1, FULL), "F32")
FP8_BLOCK = WeightFormat("fp8", 8, (128, 128), "F32")
MXFP8_ACT = ActFormat("mxfp8", 8, (1, 32))
MXFP4_ACT = ActFormat("mxfp4", 4, (1, 32))
NVFP4_ACT = ActFormat("nvfp4", 4, (1, 16))


def int_format(bits: int, group: int, scale_dtype: str = "BF16", zero_point: bool = False) -> WeightFormat:
    """The `bits`-bit integer format with one scale per `group` weights (`FULL`: per channel)."""
    return WeightFormat(f"int{bits}", bits, (1, group), scale_dtype, zero_point)
