"""Humming: int4 and int8 weights, and the orders that all its formats share.

Stored per expert, with N rows and K columns of a matrix rounded up to multiples of 256 and 128 (`w13`: N is
of gate and up together; what is added is zeros, and scales of one where they are E8M0):

- weights int32. With 16-bit activations ``[K / 16, N * 16 / codes per word]``, the tiles of Marlin; with FP8
  activations ``[K / 32, N * 4]``, tiles of 32 k by 32 n, or on SM90, if a scale covers 128 columns,
  ``[K / 64, N * 8]``, tiles of 64 k by 16 n (packed K);
- scales ``[groups, N]`` in the model's dtype and grouped order, or one per row in the order of biases;
- zero points int32 ``[groups, N / codes per word]`` in grouped order;
- biases ``[N]``.

Rows keep the checkpoint's order. Codes are offset codes. Where kernels convert them through floats that
cannot hold them, they are sign and distance from the zero point: int8 in bf16 models, and all with FP8
activations. Symmetric codes may also be sign and magnitude (``e0m3``, ``e0m7``), if none is the lowest:
Humming makes them so by itself where a matrix of the layer has no lowest code.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, WeightFormat, int_format
from ..canonical import groups, halves, padded, scale_dtype
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.recode import DistanceBytes, SignMagnitude
from ..steps.rescale import AtMost, DistanceCodes, Round
from ..steps.transforms import DtypeView, PackedCodes, Pad, Rearrange, Step
from ..steps.value_steps import Shapes, ValueStep
from .marlin import (
    BIAS,
    SCALES_GROUPED,
    SCALES_PER_CHANNEL,
    WEIGHTS_4BIT,
    WEIGHTS_8BIT,
    reduction,
)
from .scaled_tensors import FLOAT_DTYPES
from .weight_layout import Build, WeightLayout, round_up
from .word_orders import NIBBLES_INTERLEAVED, WORDS

ROWS, COLUMNS = 256, 128
"""Multiples to which a matrix is rounded up inside the layout; kernels are told how much was added."""

TILES_4BIT_A8 = Rearrange(
    "e (nt w g) (kt h l b) -> e kt (nt g l w h b)", {"w": 4, "g": 8, "h": 2, "l": 4, "b": 2}
)
"""Bytes of two codes along k, with 8-bit activations."""

WEIGHTS_4BIT_A8: tuple[Step, ...] = (TILES_4BIT_A8, WORDS, NIBBLES_INTERLEAVED)

_PACKED_K: tuple[Step, ...] = (
    Rearrange(
        "e (nr h g) (kt s r l b) -> e kt (nr g l s r h b)",
        {"h": 2, "g": 8, "s": 2, "r": 2, "l": 4, "b": 2},
    ),
    WORDS,
    NIBBLES_INTERLEAVED,
)


def start(problem: MoEProblem, role: str, fill: int = 0, every_row: bool = False) -> tuple[Step, ...]:
    """Steps that round `role` up inside the layout, with bytes `fill`; `every_row` as of `padded`."""
    dims, weight, (_, _, kind) = problem.dims, problem.scheme.weight, role.partition("_")
    of_w13 = role.startswith("w13")
    rows = halves(problem, role) * (dims.padded_intermediate if of_w13 else dims.padded_hidden)
    steps = padded(problem, role, every_row=every_row)
    if round_up(rows, ROWS) > rows:
        steps += (Pad(1, round_up(rows, ROWS), fill),)
    if kind == "bias":
        return steps
    k = reduction(problem, role)
    before, after = (
        groups(weight, size) if kind else size * weight.bits // 8 for size in (k, round_up(k, COLUMNS))
    )
    return (*steps, Pad(2, after, fill)) if after > before else steps


def bias(problem: MoEProblem, role: str) -> StoredOutput:
    """The output of a bias."""
    return StoredOutput(role, chain=Chain((*start(problem, role), BIAS)))


def scale_values(problem: MoEProblem) -> tuple[ValueStep, ...]:
    """Floating-point scales are rounded to the model's dtype, in which kernels read them."""
    dtype = MODEL_DTYPES[problem.dtype]
    return () if scale_dtype(problem) == dtype else (Round(dtype),)


def _weights(weight: WeightFormat, act: str, packed_k: bool) -> tuple[Step, ...]:
    if act == "a16":
        return WEIGHTS_4BIT if weight.bits == 4 else WEIGHTS_8BIT
    return _PACKED_K if packed_k and weight.group == COLUMNS else WEIGHTS_4BIT_A8


def _codes(problem: MoEProblem, zero: str, act: str, magnitude: bool) -> tuple[ValueStep, int]:
    """The value step of the codes, if any, and what it makes of the zero code that padding has."""
    bits = problem.scheme.weight.bits
    added = 0 if zero else 255
    if magnitude:
        return SignMagnitude(bits), 0
    if act == "fp8":
        return DistanceCodes(zero), added
    return DistanceBytes(zero), added


def _integer(act: str, magnitude: bool = False, packed_k: bool = False) -> Build:
    """The stored tensors of integer weights for activations in format `act`."""

    def output(problem: MoEProblem, role: str, shapes: Shapes) -> StoredOutput:
        weight = problem.scheme.weight
        kind = role.partition("_")[2]
        if kind == "bias":
            return bias(problem, role)
        if kind == "zero":
            bound = (AtMost(15, "zero points are 4-bit codes here"),) if weight.bits == 4 else ()
            words = (*((PackedCodes(4, False),) if weight.bits == 4 else ()), DtypeView("U8", "I32"))
            return StoredOutput(role, bound, Chain((*start(problem, role), SCALES_GROUPED, *words)))
        if kind == "scale":
            order = SCALES_PER_CHANNEL if weight.group == FULL else SCALES_GROUPED
            return StoredOutput(role, scale_values(problem), Chain((*start(problem, role), order)))
        values: tuple[ValueStep, ...] = ()
        fill = 0
        if magnitude or act == "fp8" or (weight.bits == 8 and problem.dtype == "bf16"):
            zero = f"{role}_zero" if f"{role}_zero" in shapes else ""
            step, fill = _codes(problem, zero, act, magnitude)
            values = (step,)
        steps = _weights(weight, act, packed_k)
        return StoredOutput(role, values, Chain((*start(problem, role, fill), *steps)))

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        return {role: output(problem, role, shapes) for role in shapes if not role.endswith("_input")}

    return build


def _formats(bits: int, zero_points: bool) -> tuple[WeightFormat, ...]:
    return tuple(
        int_format(bits, group, zero_point=zero)
        for zero in ((False, True) if zero_points else (False,))
        for group in (32, 64, 128, FULL)
    )


def _layout(name: str, bits: int, act: str = "a16", packed_k: bool = False) -> WeightLayout:
    magnitude = "-e0m" in name
    return WeightLayout(
        name=name,
        version=1,
        weights=_formats(bits, zero_points=not magnitude),
        build=_integer(act, magnitude, packed_k),
        scale_dtypes=FLOAT_DTYPES,
    )


INTEGER: tuple[WeightLayout, ...] = (
    _layout("humming-int4", 4),
    _layout("humming-int4-act-fp8", 4, "fp8"),
    _layout("humming-int4-act-fp8-sm90", 4, "fp8", packed_k=True),
    _layout("humming-int8", 8),
    _layout("humming-int4-e0m3", 4),
    _layout("humming-int4-e0m3-act-fp8", 4, "fp8"),
    _layout("humming-int4-e0m3-act-fp8-sm90", 4, "fp8", packed_k=True),
    _layout("humming-int8-e0m7", 8),
)
