"""moectl's own layouts of weights in rows: ``moectl-bf16``, ``-fp8``, ``-int8`` and ``-int4``.

Stored for e experts of unpadded sizes; gated experts have all gates, then all ups (h = 2 halves, else 1):

====================  ===================================================  ===========
weights               ``w13 [e, h * intermediate, hidden]``,               BF16 or F16,
                      ``w2 [e, hidden, intermediate]``                     or bytes: E4M3,
                                                                           two's complement
scales by block       ``[e, h * ceil(rows / 128), ceil(columns / 128)]``   F32
scales by channel     ``[e, h * rows, 1]``                                 F32
scales per tensor     ``w13 [e, h, 1]``, ``w2 [e, 1, 1]``                  F32
scales of tokens      ``[]``, static ones: the largest of the layer        F32
biases                ``[e, h * rows]``                                    the model's
====================  ===================================================  ===========

Blocks of gate and up rows are their own, and gate and up may differ in their scale per tensor. Checkpoints in
this order are read as they lie. 16-bit scales are widened, and an E8M0 byte is the exponent of its F32: byte
0, 2**-127 by definition, becomes zero.

Integers have no zero points. ``moectl-int8`` has a scale by channel. ``moectl-int4`` has one for each 128
columns, in the dtype of the checkpoint, stored as ``[e, columns / 128, h * rows]``, and two codes to a byte:
of each 32 columns, which have 16 bytes, byte b has column b in its low half, column 16 + b in the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...problem.moe_problem import MoEProblem
from ...problem.schemes import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, FULL, int_format
from ..canonical import gates_first, scale_dtype
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.rescale import LayerMaximum
from ..steps.transforms import Bits, DtypeView, PackedCodes, Pad, Rearrange, Step, Widen, Xor
from ..steps.value_steps import Shapes
from .scaled_tensors import E4M3_WEIGHTS, FLOAT_DTYPES
from .weight_layout import WeightLayout
from .word_orders import WORDS

_E8M0_TO_F32: tuple[Step, ...] = (
    Rearrange("e n (k b) -> e n k b", {"b": 1}),
    Pad(3, 4),
    WORDS,
    # The byte to the exponent field, the zeros that were added to all other places.
    Bits((*range(8, 31), *range(8), 31)),
    DtypeView("I32", "F32"),
    Rearrange("e n k b -> e n (k b)", {"b": 1}),
)


def _as_float32(problem: MoEProblem) -> tuple[Step, ...]:
    """Steps from scales of any supported dtype to F32."""
    dtype = scale_dtype(problem)
    if dtype == "U8":
        return _E8M0_TO_F32
    return () if dtype == "F32" else (Widen(dtype),)


_SIGNED: dict[int, tuple[Step, ...]] = {
    8: (Xor(0x80),),
    4: (
        Xor(0x88),
        PackedCodes(4, unpack=True),
        Rearrange("e n (k half b) -> e n (k b half)", {"half": 2, "b": 16}),
        PackedCodes(4, unpack=False),
    ),
}
"""Offset codes to two's complement, in the order of the layout, by their bits."""

_GROUPS_FIRST = Rearrange("e n k -> e k n")


def _build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    outputs: dict[str, StoredOutput] = {}
    for role in shapes:
        kind = role.partition("_")[2]
        if kind == "input":
            outputs[role] = StoredOutput(role, (LayerMaximum(role),), per_layer=True)
        elif kind != "global":
            weight = problem.scheme.weight
            steps: tuple[Step, ...] = ()
            if kind == "scale":
                steps = (_GROUPS_FIRST,) if weight.bits == 4 else _as_float32(problem)
            elif not kind and weight.number.grid.integer:
                steps = _SIGNED[weight.bits]
            outputs[role] = StoredOutput(role, chain=Chain((*gates_first(problem, role), *steps)))
    return outputs


ROWS: tuple[WeightLayout, ...] = (
    WeightLayout(name="moectl-bf16", version=1, weights=(BF16,), build=_build),
    WeightLayout(
        name="moectl-fp8",
        version=1,
        weights=(FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK),
        build=_build,
        logical_dtypes=E4M3_WEIGHTS,
        scale_dtypes=(*FLOAT_DTYPES, "U8"),
    ),
    WeightLayout(
        name="moectl-int4",
        version=1,
        weights=(int_format(4, 128),),
        build=_build,
        scale_dtypes=FLOAT_DTYPES,
    ),
    WeightLayout(
        name="moectl-int8",
        version=1,
        weights=(int_format(8, FULL),),
        build=_build,
        scale_dtypes=FLOAT_DTYPES,
    ),
)
