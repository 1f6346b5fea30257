"""Layouts of engines' own Triton kernels: canonical tensors with all gates before all ups.

- BF16, and FP8 with its scales, unchanged; per-tensor FP8 has one scale per expert, ``[e]``, or, in
  ``plain-fp8-halves``, gate's and up's as they are, ``[e, 2, 1]``, which needs no quantizing again;
- integer weights (WNA16) ``[N, K]`` packed bytes, scales ``[N, groups]``, zero points packed in pairs along
  N: ``[N / 2, groups]`` bytes for 4-bit codes, ``[N, groups]`` for 8-bit ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...problem.moe_problem import MoEProblem
from ...problem.schemes import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, FULL, int_format
from ..canonical import gates_first
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.rescale import AtMost, LayerMaximum
from ..steps.transforms import PackedCodes, Rearrange, Step
from ..steps.value_steps import Shapes
from .scaled_tensors import E4M3_WEIGHTS, FLOAT_DTYPES, fp8_tensor
from .weight_layout import WeightLayout, by_role

_ZEROS_IN_TWOS: tuple[Step, ...] = (
    Rearrange("e (n s) g -> e n (g s)", {"s": 2}),
    PackedCodes(4, False),
)


def _fp8(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    if problem.scheme.weight == FP8_TENSOR:
        return fp8_tensor(gates_first)(problem, shapes, requantize)
    return by_role(gates_first)(problem, shapes, requantize)


def _halves(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    """FP8 per tensor with each half's own scale, and one static activation scale for the layer."""
    outputs = dict(by_role(gates_first)(problem, shapes, requantize))
    for role in shapes:
        if role.endswith("_scale"):
            outputs[role] = StoredOutput(role)
        elif role.endswith("_input"):
            outputs[role] = StoredOutput(role, (LayerMaximum(role),), per_layer=True)
    return outputs


def _wna16(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
    outputs = dict(by_role(gates_first)(problem, shapes, requantize))
    for role in [role for role in shapes if role.endswith("_zero")]:
        if problem.scheme.weight.bits == 4:
            bound = AtMost(15, "zero points are 4-bit codes here")
            outputs[role] = StoredOutput(
                role, (bound,), Chain((*gates_first(problem, role), *_ZEROS_IN_TWOS))
            )
    return outputs


PLAIN: tuple[WeightLayout, ...] = (
    WeightLayout(name="plain-bf16", version=1, weights=(BF16,), build=by_role(gates_first)),
    WeightLayout(
        name="plain-fp8",
        version=1,
        weights=(FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK),
        build=_fp8,
        logical_dtypes=E4M3_WEIGHTS,
        scale_dtypes=FLOAT_DTYPES,
    ),
    WeightLayout(
        name="plain-fp8-halves",
        version=1,
        weights=(FP8_TENSOR,),
        build=_halves,
        logical_dtypes=E4M3_WEIGHTS,
        scale_dtypes=FLOAT_DTYPES,
    ),
    WeightLayout(
        name="triton-wna16",
        version=1,
        weights=tuple(
            int_format(bits, group, zero_point=zero)
            for bits in (4, 8)
            for zero in (False, True)
            for group in (32, 64, 128, FULL)
        ),
        build=_wna16,
        scale_dtypes=("BF16", "F16"),
        bias=False,
    ),
)
