"""Humming: MXFP4, NVFP4, FP8 and MXFP8 weights.

Weights with 16-bit activations, and biases, as in `humming`; from SM100 on (``-sm100``), the codes of a word
lie in their own order, as the GPU's own conversions take them. Scales, with N rows and K columns rounded up:

- MXFP4 and MXFP8: ``[groups, N]`` E8M0 bytes in grouped order; fp16 models read exponents of 5 bits in a
  byte's upper bits instead;
- NVFP4: ``[groups, N]`` E4M3 bytes in grouped order, and a global scale per expert ``[e]`` F32. If gate and
  up have different ones (``-rows``), `w13` has one per row, ``[N]`` in the model's dtype, ordered as biases;
- FP8: one scale per row and block of columns in the model's dtype, ``[groups, N]``; per tensor ``[e]`` F32.

FP8 with FP8 activations, before SM100: bytes in chunks of 16 columns of all rows, int32 ``[K / 16, N * 4]``;
scales of blocks ``[K / 128, N / 128]`` F32, or one per row in the order of biases in the model's dtype.

MXFP4 with 8-bit activations:

- FP8 in groups of 128, SM90: tiles of 64 k by 16 n, with only the signs interleaved. Scales are exponents
  above the least that an expert keeps, which is at most 11 below its largest, plus 1; ``[e]`` F32 is half of
  2 to the least. Codes with a smaller scale are rounded to it, and -0 is 0;
- MXFP8, SM120: tiles of 32 k by 32 n; scales int32 ``[groups / 2, N / 2]`` of rows r and r + 8, two groups;
- MXFP8, SM100: int32 ``[N, K / 8]`` in order; scales int32 ``[groups / 4, N]`` of four groups, by 128 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, FULL, MXFP4, MXFP8, NVFP4, WeightFormat
from ..canonical import INTERLEAVED, halves
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.recode import E5M0, E5M0_OF_ONE, FusedCodes, FusedGlobal, FusedScales, OneOfHalves
from ..steps.rescale import RepeatRows, Round
from ..steps.transforms import Pad, Rearrange, Step
from ..steps.value_steps import Shapes
from .humming import ROWS, WEIGHTS_4BIT_A8, bias, scale_values, start
from .marlin import BIAS, SCALES_GROUPED, SCALES_PER_CHANNEL, WEIGHTS_4BIT, WEIGHTS_8BIT
from .scaled_tensors import E4M3_SCALES, E8M0_SCALES, FLOAT_DTYPES, float32, fp8_tensor
from .weight_layout import Build, WeightLayout, round_up
from .word_orders import SIGNS_INTERLEAVED, WORDS

_ONE = 127
"""E8M0 of one: what is added to MX scales."""

_OCTAVES = 11
"""Range of MXFP4 scales under FP8 activations."""

_PLAIN_4BIT: tuple[Step, ...] = WEIGHTS_4BIT[:-1]
_PLAIN_8BIT: tuple[Step, ...] = (
    Rearrange(
        "e (nt w c h) (kt rh l rl) -> e kt (nt h l w c rh rl)",
        {"w": 4, "c": 2, "h": 8, "rh": 2, "l": 4, "rl": 2},
    ),
    WORDS,
)
_FUSED: tuple[Step, ...] = (
    Rearrange(
        "e (nr h g) (kt s r l b) -> e kt (nr g l s h r b)",
        {"h": 2, "g": 8, "s": 2, "r": 2, "l": 4, "b": 2},
    ),
    WORDS,
    SIGNS_INTERLEAVED,
)
_CHUNKS: tuple[Step, ...] = (Rearrange("e n (c b) -> e c (n b)", {"b": 16}), WORDS)
_SCALES_SM100: tuple[Step, ...] = (
    Rearrange("e (n r l) (g q) -> e g (n l r q)", {"r": 4, "l": 32, "q": 4}),
    WORDS,
)
_SCALES_SM120: tuple[Step, ...] = (
    Rearrange("e (n p l) (g q) -> e g (n l p q)", {"p": 2, "l": 8, "q": 2}),
    WORDS,
)


def _build(output: Callable[[MoEProblem, str], StoredOutput]) -> Build:
    """Biases as they always are, other roles by `output`; 16-bit activations need no scales of inputs."""

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        return {
            role: bias(problem, role) if role.endswith("_bias") else output(problem, role)
            for role in shapes
            if not role.endswith("_input")
        }

    return build


def _mx(
    weights: tuple[Step, ...], scales: tuple[Step, ...] = (SCALES_GROUPED,), software: bool = True
) -> Build:
    """E8M0 scales in the order of `scales`; fp16 kernels that multiply by them in `software` need E5M0."""

    def output(problem: MoEProblem, role: str) -> StoredOutput:
        if not role.endswith("_scale"):
            return StoredOutput(role, chain=Chain((*start(problem, role), *weights)))
        narrow = software and problem.dtype == "fp16"
        steps = (*start(problem, role, E5M0_OF_ONE if narrow else _ONE), *scales)
        return StoredOutput(role, (E5M0(),) if narrow else (), Chain(steps))

    return _build(output)


def _fused(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    outputs: dict[str, StoredOutput] = {}
    for role in shapes:
        matrix, _, kind = role.partition("_")
        if kind == "bias":
            outputs[role] = bias(problem, role)
        elif kind == "scale":
            outputs[role] = StoredOutput(
                role, (FusedScales(_OCTAVES),), Chain((*start(problem, role), SCALES_GROUPED))
            )
            outputs[f"{matrix}_global"] = StoredOutput(role, (FusedGlobal(_OCTAVES),))
        elif not kind:
            values = (FusedCodes(f"{role}_scale", _OCTAVES),)
            outputs[role] = StoredOutput(role, values, Chain((*start(problem, role), *_FUSED)))
    return outputs


_ONE_GLOBAL = OneOfHalves("--to humming-rows has one for every row")


def _nvfp4(weights: tuple[Step, ...], rows: bool = False) -> Build:
    def output(problem: MoEProblem, role: str) -> StoredOutput:
        if role.endswith("_global"):
            by_row = rows and halves(problem, role) == 2
            return _global_of_rows(problem, role) if by_row else StoredOutput(role, (_ONE_GLOBAL,))
        order = (SCALES_GROUPED,) if role.endswith("_scale") else weights
        return StoredOutput(role, chain=Chain((*start(problem, role), *order)))

    return _build(output)


def _global_of_rows(problem: MoEProblem, role: str) -> StoredOutput:
    """Gate's and up's global scales for each of their rows, in the model's dtype."""
    n = problem.dims.padded_intermediate
    steps: list[Step] = [Rearrange("e n g -> e (n g)")]
    if problem.rows == INTERLEAVED:
        steps.append(Rearrange("e (s n) -> e (n s)", {"s": 2}))
    full = round_up(2 * n, ROWS)
    steps += [Pad(1, full)] if full > 2 * n else []
    values = (RepeatRows(n, n, 2), Round(MODEL_DTYPES[problem.dtype]))
    return StoredOutput(role, values, Chain((*steps, BIAS)))


def _fp8(weights: tuple[Step, ...]) -> Build:
    def scale(problem: MoEProblem, role: str) -> StoredOutput:
        weight, values = problem.scheme.weight, scale_values(problem)
        if weight.block[0] > 1:
            n = problem.dims.intermediate if role.startswith("w13") else problem.dims.hidden
            values += (RepeatRows(weight.block[0], n, halves(problem, role)),)
        order = SCALES_PER_CHANNEL if weight.group == FULL else SCALES_GROUPED
        return StoredOutput(role, values, Chain((*start(problem, role, every_row=True), order)))

    def matrices(problem: MoEProblem, role: str) -> tuple[Step, ...]:
        return (*start(problem, role), *((BIAS,) if role.endswith("_bias") else weights))

    def output(problem: MoEProblem, role: str) -> StoredOutput:
        if role.endswith("_scale"):
            return scale(problem, role)
        return StoredOutput(role, chain=Chain(matrices(problem, role)))

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        if problem.scheme.weight != FP8_TENSOR:
            return _build(output)(problem, shapes, requantize)
        outputs = fp8_tensor(matrices)(problem, shapes, requantize)
        return {role: stored for role, stored in outputs.items() if not role.endswith("_input")}

    return build


def _fp8_tokens(problem: MoEProblem, role: str) -> StoredOutput:
    if not role.endswith("_scale"):
        return StoredOutput(role, chain=Chain((*start(problem, role), *_CHUNKS)))
    if problem.scheme.weight.group == FULL:
        steps = (*start(problem, role, every_row=True), SCALES_PER_CHANNEL)
        return StoredOutput(role, scale_values(problem), Chain(steps))
    return StoredOutput(role, chain=Chain((*float32(problem), Rearrange("e n g -> e g n"))))


def _mx_layout(name: str, build: Build, weight: WeightFormat = MXFP4) -> WeightLayout:
    return WeightLayout(name, 1, (weight,), build, E8M0_SCALES, ("U8",))


def _nvfp4_layout(name: str, build: Build) -> WeightLayout:
    return WeightLayout(name, 1, (NVFP4,), build, E4M3_SCALES, ("U8",))


def _fp8_layout(name: str, weights: tuple[Step, ...]) -> WeightLayout:
    formats = (FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK)
    return WeightLayout(name, 1, formats, _fp8(weights), scale_dtypes=("F32", "BF16", "F16"))


FLOAT: tuple[WeightLayout, ...] = (
    _mx_layout("humming-mxfp4", _mx(WEIGHTS_4BIT)),
    _mx_layout("humming-mxfp4-act-fp8", _fused),
    _nvfp4_layout("humming-nvfp4", _nvfp4(WEIGHTS_4BIT)),
    _nvfp4_layout("humming-nvfp4-rows", _nvfp4(WEIGHTS_4BIT, rows=True)),
    _fp8_layout("humming-fp8", WEIGHTS_8BIT),
    WeightLayout(
        "humming-fp8-act-fp8", 1, (FP8_CHANNEL, FP8_BLOCK), _build(_fp8_tokens), scale_dtypes=FLOAT_DTYPES
    ),
    _mx_layout("humming-mxfp8", _mx(WEIGHTS_8BIT), MXFP8),
    _mx_layout("humming-mxfp4-sm100", _mx(_PLAIN_4BIT)),
    _mx_layout("humming-mxfp4-act-mxfp8-sm100", _mx((WORDS,), _SCALES_SM100, software=False)),
    _mx_layout("humming-mxfp4-act-mxfp8-sm120", _mx(WEIGHTS_4BIT_A8, _SCALES_SM120, software=False)),
    _nvfp4_layout("humming-nvfp4-sm100", _nvfp4(_PLAIN_4BIT)),
    _fp8_layout("humming-fp8-sm100", _PLAIN_8BIT),
    _mx_layout("humming-mxfp8-sm100", _mx(_PLAIN_8BIT), MXFP8),
)
