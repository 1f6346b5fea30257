"""Marlin: MXFP4, NVFP4, FP8 and MXFP8 weights.

Weights and biases as in `marlin`. Scales, with N rows of the padded matrix:

- MXFP4 and MXFP8: ``[groups, N]`` E8M0 bytes in grouped order, with pairs exchanged in every four; with fp8
  activations (MXFP4) in the order for one group, each byte plus 6. fp16 models read them through fp16.
- NVFP4: ``[groups, N]`` bytes of 5 exponent and 3 mantissa bits in the order of MXFP4, and a global
  scale per expert ``[e]`` F32.
- FP8: one scale per row and block of columns in the model's dtype, times 2**120 (bf16) or 2**8 (fp16).
"""

from __future__ import annotations

from collections.abc import Mapping

from ...dtypes import MODEL_DTYPES
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, FULL, MXFP4, MXFP8, NVFP4
from ..canonical import halves, padded, scale_dtype
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.rescale import S0E5M3, AtMost, GlobalOfS0E5M3, HalfE8M0, PerExpert, RepeatRows, Round, Times
from ..steps.transforms import Add, Step
from ..steps.value_steps import Shapes, ValueStep
from .marlin import (
    BIAS,
    SCALE_PAIRS,
    SCALES_GROUPED,
    SCALES_PER_CHANNEL,
    WEIGHTS_4BIT,
    WEIGHTS_4BIT_A8,
    WEIGHTS_8BIT,
    scale_steps,
    several_groups,
)
from .weight_layout import Build, WeightLayout

_FP4_IN_FP8 = 6
"""Exponent bias of E4M3 minus that of E2M1, added to E8M0 bytes for fp8 activations."""
_EXPONENTS = {"bf16": 120, "fp16": 8}
"""Exponent bias of the model's dtype minus that of E4M3."""


def _weights(problem: MoEProblem, role: str, steps: tuple[Step, ...]) -> StoredOutput | None:
    """The output of a weight matrix or a bias; None for other roles."""
    if role in ("w13", "w2"):
        return StoredOutput(role, chain=Chain((*padded(problem, role), *steps)))
    if role.endswith("_bias"):
        return StoredOutput(role, chain=Chain((*padded(problem, role), BIAS)))
    return None


def _mx(steps: tuple[Step, ...], act: str = "a16") -> Build:
    """Weights by `steps` with E8M0 scales."""

    def scale(problem: MoEProblem, role: str) -> StoredOutput:
        values: tuple[ValueStep, ...] = (HalfE8M0(),) if problem.dtype == "fp16" else ()
        if act == "a16":
            return StoredOutput(role, values, Chain((*padded(problem, role), SCALES_GROUPED, SCALE_PAIRS)))
        bound = AtMost(255 - _FP4_IN_FP8, "scales for fp8 activations are E8M0 bytes plus 6")
        return StoredOutput(
            role, (*values, bound), Chain((*padded(problem, role), SCALES_PER_CHANNEL, Add(_FP4_IN_FP8)))
        )

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        roles = [role for role in shapes if not role.endswith("_input")]
        return {role: _weights(problem, role, steps) or scale(problem, role) for role in roles}

    return build


def _nvfp4(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    half = problem.dtype == "fp16"
    outputs: dict[str, StoredOutput] = {}
    for role in shapes:
        weights = _weights(problem, role, WEIGHTS_4BIT)
        matrix, _, kind = role.partition("_")
        if weights:
            outputs[role] = weights
        elif kind == "scale":
            chain = Chain((*padded(problem, role), SCALES_GROUPED, SCALE_PAIRS))
            outputs[role] = StoredOutput(role, (S0E5M3(role, half),), chain)
        elif kind == "global":
            values = (PerExpert("first", halves(problem, role)), GlobalOfS0E5M3(f"{matrix}_scale", half))
            outputs[role] = StoredOutput(role, values)
    return outputs


def _fp8_scale(problem: MoEProblem, role: str) -> StoredOutput:
    """One scale per row and column block in the model's dtype, repeated from blocks of rows."""
    weight, dtype = problem.scheme.weight, MODEL_DTYPES[problem.dtype]
    values: tuple[ValueStep, ...] = () if scale_dtype(problem) == dtype else (Round(dtype),)
    values += (Times(_EXPONENTS[problem.dtype]),)
    if weight.block[0] != 1:
        rows = problem.dims.intermediate if role.startswith("w13") else problem.dims.hidden
        times = rows if weight.block[0] == FULL else weight.block[0]
        values += (RepeatRows(times, rows, halves(problem, role)),)
    order = scale_steps(several_groups(problem, role))
    return StoredOutput(role, values, Chain((*padded(problem, role, every_row=True), *order)))


def _fp8(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    roles = [role for role in shapes if not role.endswith("_input")]
    return {role: _weights(problem, role, WEIGHTS_8BIT) or _fp8_scale(problem, role) for role in roles}


_E8M0 = {"w13_scale": "F8_E8M0", "w2_scale": "F8_E8M0"}

FLOAT: tuple[WeightLayout, ...] = (
    WeightLayout(
        name="marlin-mxfp4",
        version=1,
        weights=(MXFP4,),
        build=_mx(WEIGHTS_4BIT),
        logical_dtypes=_E8M0,
        scale_dtypes=("U8",),
    ),
    WeightLayout(
        name="marlin-mxfp4-act-fp8",
        version=1,
        weights=(MXFP4,),
        build=_mx(WEIGHTS_4BIT_A8, "fp8"),
        logical_dtypes=_E8M0,
        scale_dtypes=("U8",),
    ),
    WeightLayout(
        name="marlin-nvfp4",
        version=1,
        weights=(NVFP4,),
        build=_nvfp4,
        logical_dtypes={"w13_scale": "F8_E4M3", "w2_scale": "F8_E4M3"},
        scale_dtypes=("U8",),
    ),
    WeightLayout(
        name="marlin-fp8",
        version=1,
        weights=(FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK),
        build=_fp8,
        scale_dtypes=("F32", "BF16", "F16"),
    ),
    WeightLayout(
        name="marlin-mxfp8",
        version=1,
        weights=(MXFP8,),
        build=_mx(WEIGHTS_8BIT),
        logical_dtypes=_E8M0,
        scale_dtypes=("U8",),
    ),
)
