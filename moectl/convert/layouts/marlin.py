"""Marlin: int4 and int8 weights with 16-bit, int8 or fp8 activations, and steps shared by all its formats.

Stored per expert, with N rows and K columns of the padded matrix (`w13`: N = 2 * intermediate):

- weights int32 ``[K / 16, N * 16 / codes per word]``: tiles of 16 k by 64 n, k-tile major; with 8-bit
  activations tiles of 32 k by 32 n, two rows of the result to a row of tiles;
- scales ``[groups, N]``, dtype unchanged;
- zero points int32 ``[groups, N / codes per word]``;
- biases ``[N]``.

Rows keep the checkpoint's order. Scales have the grouped order if there is more than one group, which is the
kernel's rule; with 8-bit activations they always have the order for one group. With int8 activations and
several groups, scales are int16 with a common factor per layer; with fp8 activations, codes are sign and
distance from the zero point, and scales are multiplied by 512.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, WeightFormat, int_format
from ..canonical import groups, padded
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.rescale import AtMost, DistanceCodes, Int16OfLargest, Largest4096th, Times
from ..steps.transforms import DtypeView, PackedCodes, Rearrange, Step
from ..steps.value_steps import Shapes, ValueStep
from .weight_layout import Build, WeightLayout
from .word_orders import NIBBLES_APART, NIBBLES_INTERLEAVED, WORDS

_TILE = {"w": 4, "c": 2, "h": 8, "rh": 2, "l": 4}
_TILE_A8 = {"w": 4, "g": 8, "h": 2, "l": 4}
_TWO_ROWS = Rearrange("e kt (s x) -> e (kt s) x", {"s": 2})

WEIGHTS_4BIT: tuple[Step, ...] = (
    Rearrange("e (nt w c h) (kt rh l) -> e kt (nt h l w c rh)", _TILE),
    WORDS,
    NIBBLES_APART,
)
"""Bytes of two codes along k; inside each word the even k, then the odd ones."""

WEIGHTS_8BIT: tuple[Step, ...] = (
    Rearrange("e (nt w c h) (kt rh l rl) -> e kt (nt h l w c rl rh)", {**_TILE, "rl": 2}),
    WORDS,
)

WEIGHTS_4BIT_A8: tuple[Step, ...] = (
    Rearrange("e (nt w g) (kt h l b) -> e kt (nt g l w h b)", {**_TILE_A8, "b": 2}),
    WORDS,
    NIBBLES_INTERLEAVED,
    _TWO_ROWS,
)
"""Bytes of two codes along k; inside each word the first four k interleaved with those 16 further."""

WEIGHTS_8BIT_A8: tuple[Step, ...] = (
    Rearrange("e (nt w g) (kt h l i) -> e kt (nt g l w h i)", {**_TILE_A8, "i": 4}),
    WORDS,
    _TWO_ROWS,
)

SCALES_GROUPED = Rearrange("e (n j i) g -> e g (n i j)", {"i": 8, "j": 8})
SCALES_PER_CHANNEL = Rearrange("e (n a i b) g -> e g (n i a b)", {"a": 4, "i": 4, "b": 2})
SCALE_PAIRS = Rearrange("e g (n p q) -> e g (n q p)", {"p": 2, "q": 2})
BIAS = Rearrange("e (n a i b) -> e (n i a b)", {"a": 4, "i": 4, "b": 2})
_ZERO_COLUMNS = {
    4: Rearrange("e g (n a b) -> e g (n b a)", {"a": 4, "b": 2}),
    8: SCALE_PAIRS,
}

_FP8_EXPONENT = 9
"""With fp8 activations the kernel reads a code as 2**-9 times its value."""


def reduction(problem: MoEProblem, role: str) -> int:
    """Padded size of the reduction axis of the matrix of `role`."""
    return problem.dims.padded_hidden if role.startswith("w13") else problem.dims.padded_intermediate


def several_groups(problem: MoEProblem, role: str) -> bool:
    """True when the padded matrix of `role` has more than one scale along its reduction axis."""
    return groups(problem.scheme.weight, reduction(problem, role)) > 1


def scale_steps(grouped: bool) -> tuple[Step, ...]:
    """Steps for integer scales ``[e, n, groups]``: in grouped order, or in the order for one group."""
    return (SCALES_GROUPED if grouped else SCALES_PER_CHANNEL,)


def _weights(bits: int, act: str) -> tuple[Step, ...]:
    if act == "a16":
        return WEIGHTS_4BIT if bits == 4 else WEIGHTS_8BIT
    return WEIGHTS_4BIT_A8 if bits == 4 else WEIGHTS_8BIT_A8


def _zeros(bits: int, act: str) -> tuple[Step, ...]:
    """Steps for zero points ``[e, n, groups]``: the order of grouped scales, packed along n."""
    columns = (_ZERO_COLUMNS[bits],) if act == "a16" else ()
    packed = (PackedCodes(4, False),) if bits == 4 else ()
    return (SCALES_GROUPED, *columns, *packed, DtypeView("U8", "I32"))


def _scale_values(problem: MoEProblem, role: str, act: str) -> tuple[ValueStep, ...]:
    if act == "fp8":
        return (Times(_FP8_EXPONENT),)
    return (Int16OfLargest(role),) if act == "int8" and several_groups(problem, role) else ()


def _integer(act: str) -> Build:
    """The stored tensors of integer weights for activations in format `act`."""

    def output(problem: MoEProblem, role: str, shapes: Shapes) -> StoredOutput:
        bits = problem.scheme.weight.bits
        start = padded(problem, role)
        if role.endswith("_bias"):
            return StoredOutput(role, chain=Chain((*start, BIAS)))
        if role.endswith("_zero"):
            values = (AtMost(15, "zero points are 4-bit codes here"),) if bits == 4 else ()
            return StoredOutput(role, values, Chain((*start, *_zeros(bits, act))))
        if role.endswith("_scale"):
            steps = scale_steps(act == "a16" and several_groups(problem, role))
            return StoredOutput(role, _scale_values(problem, role, act), Chain((*start, *steps)))
        zero = f"{role}_zero" if f"{role}_zero" in shapes else ""
        codes = (DistanceCodes(zero),) if act == "fp8" else ()
        return StoredOutput(role, codes, Chain((*start, *_weights(bits, act))))

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        outputs = {role: output(problem, role, shapes) for role in shapes if not role.endswith("_input")}
        if act == "int8":
            outputs |= {
                f"{matrix}_input_global": StoredOutput(scale, (Largest4096th(scale),), per_layer=True)
                for matrix in ("w13", "w2")
                if several_groups(problem, scale := f"{matrix}_scale")
            }
        return outputs

    return build


def _formats(bits: int) -> tuple[WeightFormat, ...]:
    return tuple(
        int_format(bits, group, zero_point=zero) for zero in (False, True) for group in (32, 64, 128, FULL)
    )


def _layout(bits: int, act: str = "a16") -> WeightLayout:
    return WeightLayout(
        name=f"marlin-int{bits}" if act == "a16" else f"marlin-int{bits}-act-{act}",
        version=1,
        weights=_formats(bits),
        build=_integer(act),
        scale_dtypes=("BF16", "F16"),
    )


MARLIN_INT4 = _layout(4)
MARLIN_INT8 = _layout(8)
INTEGER: tuple[WeightLayout, ...] = (
    MARLIN_INT4,
    _layout(4, "int8"),
    _layout(4, "fp8"),
    MARLIN_INT8,
    _layout(8, "int8"),
)
