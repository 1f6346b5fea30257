"""Launch configurations of a kernel family (`TileFamily`), and what their legality depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ...capabilities.own_kernels import in_rows, token_format
from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL
from .launch import Launch
from .launch_shape import LaunchShape


@dataclass(frozen=True)
class TileFamily:
    """The launch configurations of kernels that compute a whole layer, without the kernels.

    Attributes:
        tile: the type of its launch configurations, a frozen dataclass of plain numbers.
        fits: why it does not support a problem with a tile, its weight format included, as a clause; empty if
            it does.
        shape: what the model of time has to know of a tile (`launch_model`).
        capability: lowest and highest supported compute capability.
        candidates: tiles that are worth measuring for a problem.
        most_assignments: most of them in a call for which they are worth measuring, unless it has one token.
        narrowest: columns of tokens of its narrowest products; at one token, wider tiles are not worth it.
        tokens_per_expert: range of tokens per active expert in which they are worth measuring.
        suits: whether one of a layer's candidates is worth measuring at a number of tokens per active expert.
        small_binaries: how many kernels of a layer are compiled beside the GEMMs, for all numbers of tokens.
    """

    tile: type
    fits: Callable[[MoEProblem, Any], str]
    shape: Callable[[MoEProblem, Any], LaunchShape]
    capability: tuple[tuple[int, int], tuple[int, int]] = ((8, 0), (99, 9))
    candidates: Callable[[MoEProblem], Sequence[Any]] = lambda problem: ()
    tokens_per_expert: tuple[float, float] = (0.0, math.inf)
    suits: Callable[[MoEProblem, Any, float], bool] = lambda problem, tile, tokens_per_expert: True
    most_assignments: float = math.inf
    narrowest: int = 2
    small_binaries: Callable[[MoEProblem], int] = lambda problem: 3

    def most_tokens(self, problem: MoEProblem) -> float:
        """The most tokens of a call of the layer for which launches are worth measuring."""
        return max(1.0, self.most_assignments / problem.top_k)


def quantizing_binaries(problem: MoEProblem) -> int:
    """Compiled kernels that quantize what enters the GEMMs of a layer: one, or two if all tokens share a
    dynamic scale."""
    form = token_format(problem)
    return 0 if form is None else 1 + (form.block == (FULL, FULL) and form.dynamic)


def launch_of(families: Mapping[str, TileFamily], name: str, tile: Mapping[str, int]) -> Launch | None:
    """The launch of a row; None if `families` has no such family, or its tile has other fields.

    A field that the row lacks, as it was written before there was one, has its default.
    """
    family = families.get(name)
    if family is None:
        return None
    known = fields(family.tile)
    needed = {field.name for field in known if field.default is MISSING}
    if not needed <= set(tile) <= {field.name for field in known}:
        return None
    return Launch(name, family.tile(**tile))


SPLITS = (2, 3, 4, 6, 8)
"""Programs that share the second GEMM's reduction, where that is worth measuring."""

MOST_PARTS, FEWEST_STEPS = 792, 4
"""Most tiles of the second GEMM, with one token tile of each expert and all parts, for each program of a
multiprocessor: six for one of an H200, more than keep it at work. And fewest steps of a part."""


def splits_of(problem: MoEProblem, rows: int, programs: int, columns: int) -> list[int]:
    """Which of `SPLITS` are candidates for tiles of the second GEMM.

    Args:
        rows: weight rows of a tile.
        programs: those that are resident on a multiprocessor.
        columns: of a step.
    """
    tiles = problem.local_experts * math.ceil(problem.dims.hidden / rows) / programs
    steps = math.ceil(problem.dims.intermediate / columns)
    return [split for split in SPLITS if tiles * split <= MOST_PARTS and steps >= split * FEWEST_STEPS]


SIZE_MULTIPLE = 16
"""Required divisor of sizes for kernels with 16-byte copies; Triton specializes on it."""


DECODED = ("mxfp4", "nvfp4", "mxfp8", "int4", "int8")
"""Weight formats that every kernel family that decodes tiles supports."""


def column_refusal(problem: MoEProblem, formats: Sequence[str] = DECODED) -> str:
    """Why kernels with steps of 64 columns do not support a layer's format, groups or sizes; empty if they
    do.

    `formats` are names of the weight formats that the kernels decode.
    """
    weight, dims = problem.scheme.weight, problem.dims
    if in_rows(problem) and weight.name in formats:
        return f"it decodes tiles; {weight} weights with {problem.scheme.act} tokens are read in rows"
    if weight.name not in formats:
        return f"it decodes {', '.join(formats)}; the layer has {weight}"
    wide = weight.group > 0 and weight.group % 64 == 0
    if not (wide or weight.name == "nvfp4" or weight.group in (32, FULL)):
        return f"it supports scale groups of 32, of multiples of 64 and of whole rows; the layer has {weight}"
    for name, size in (("hidden", dims.hidden), ("intermediate", dims.intermediate)):
        if size % SIZE_MULTIPLE:
            return f"it needs sizes that are multiples of {SIZE_MULTIPLE}; the layer's {name} size is {size}"
    return ""


_FLOATS = {name: short for short, name in MODEL_DTYPES.items()}


def scale_name(problem: MoEProblem) -> str:
    """Type of the scales: ``e8m0``, ``e4m3``, ``bf16`` or ``fp16``; empty if no kernel supports it."""
    weight = problem.scheme.weight
    if weight.number.byte_scale:
        return {"E8M0": "e8m0", "F8_E4M3": "e4m3"}[weight.number.byte_scale]
    return _FLOATS.get(weight.scale_dtype, "") if weight.scale_dtype else problem.dtype


def weight_scales(problem: MoEProblem) -> str:
    """What has a scale in weights in rows: ``none``, a ``block``, a ``group`` of columns of a row, a
    ``channel``, or the ``tensor``."""
    weight = problem.scheme.weight
    if weight.bits == 16:
        return "none"
    rows, _ = weight.block
    if FULL in weight.block:
        return "tensor" if rows == FULL else "channel"
    return "group" if rows == 1 else "block"


SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Most KiB of shared memory of a program, by ten times the compute capability."""

SHARED_MEMORY = SHARED_KIB[90] << 10
"""Most bytes of shared memory that a program may have on SM90."""

RESERVED = 1 << 10
"""Bytes of shared memory that a program takes beside its own, and that a multiprocessor has beside those of
its largest."""

REGISTERS = 65536
"""Registers of a multiprocessor."""


def programs_by_registers(registers: int, warps: int) -> int:
    """Programs of so many warps that fit into one multiprocessor, with so many registers per thread.

    Example:
        >>> programs_by_registers(registers=84, warps=4)
        5
    """
    return max(1, REGISTERS // (32 * warps * 8 * math.ceil(registers / 8)))


FORMATS: dict[str, tuple[tuple[str, str], ...]] = {
    "e8m0": (("mxfp4", "bf16"), ("mxfp8", "bf16")),
    "e4m3": (("nvfp4", "bf16"), ("nvfp4", "fp16")),
    "bf16": (("int4", "bf16"), ("int8", "bf16")),
    "fp16": (("int4", "fp16"), ("int8", "fp16"), ("int4", "bf16")),
}
"""Dtype of the scales -> supported (weights, activations): those in which no weight is rounded twice."""


def dtype_refusal(problem: MoEProblem) -> str:
    """Why `FORMATS` excludes a layer's dtypes; empty if it supports them."""
    weight, scale = problem.scheme.weight, scale_name(problem)
    if (weight.name, problem.dtype) in FORMATS.get(scale, ()):
        return ""
    return f"it does not support {problem.dtype} tokens with {weight} weights and {scale} scales"


def scale_words(format: str, group: int) -> int:
    """int32 words of scales that a 64x64 tile of weights needs."""
    return 64 if format == "nvfp4" or (format in ("int4", "int8") and group == 32) else 32


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below `n`, which is at least 1."""
    return 1 << (n - 1).bit_length()
