"""Stored tensors shared by several layouts: NVFP4 and FP8 with their scales and per-expert numbers.

Each function returns a layout's `Build` for the steps of its weights, which include padding and row order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...problem.moe_problem import MoEProblem
from ..canonical import halves, scale_dtype
from ..recipe.chain import Chain
from ..recipe.recipe import StoredOutput
from ..steps.rescale import AtLeast, LayerMaximum, PerExpert, Requantize
from ..steps.transforms import Step, Widen
from ..steps.value_steps import Shapes
from .weight_layout import Build

Steps = Callable[[MoEProblem, str], tuple[Step, ...]]

F4_WEIGHTS = {"w13": "F4", "w2": "F4"}
E4M3_WEIGHTS = {"w13": "F8_E4M3", "w2": "F8_E4M3"}
E8M0_SCALES = {"w13_scale": "F8_E8M0", "w2_scale": "F8_E8M0"}
E4M3_SCALES = {"w13_scale": "F8_E4M3", "w2_scale": "F8_E4M3"}
FLOAT_DTYPES = ("F32", "BF16", "F16")

LEAST_SCALE = 1e-10
"""Smallest block scale: below it FlashInfer's FP8 kernels return NaN."""


def float32(problem: MoEProblem) -> tuple[Step, ...]:
    """Steps that widen scales to F32."""
    dtype = scale_dtype(problem)
    return () if dtype == "F32" else (Widen(dtype),)


def nvfp4(weights: Steps, scales: Steps, *, inputs: str) -> Build:
    """Weights and E4M3 scales by their steps, with one global and one activation scale per expert.

    `inputs`: the activation scale is the maximum of the ``layer`` for all experts, or of each ``expert``.
    """

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        outputs: dict[str, StoredOutput] = {}
        for role in shapes:
            kind = role.partition("_")[2]
            count = halves(problem, role)
            if kind == "global":
                outputs[role] = StoredOutput(role, (PerExpert("first", count),))
            elif kind == "input":
                maximum = LayerMaximum(role) if inputs == "layer" else PerExpert("largest", count)
                outputs[role] = StoredOutput(role, (maximum,))
            else:
                steps = scales if kind == "scale" else weights
                outputs[role] = StoredOutput(role, chain=Chain(steps(problem, role)))
        return outputs

    return build


def fp8_tensor(weights: Steps) -> Build:
    """Weights by their steps, one scale per expert, and one static activation scale for the layer."""

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        outputs: dict[str, StoredOutput] = {}
        for role in shapes:
            kind = role.partition("_")[2]
            count = halves(problem, role)
            requantized = requantize and count == 2
            if kind == "scale":
                take = PerExpert("requantized" if requantized else "same", count)
                outputs[role] = StoredOutput(role, (take,), Chain(float32(problem)))
            elif kind == "input":
                outputs[role] = StoredOutput(role, (LayerMaximum(role),), per_layer=True)
            else:
                values = (Requantize(f"{role}_scale"),) if requantized and not kind else ()
                outputs[role] = StoredOutput(role, values, Chain(weights(problem, role)))
        return outputs

    return build


def fp8_block(weights: Steps, rows: Steps) -> Build:
    """Weights by their steps; F32 block scales, at least `LEAST_SCALE`, in the order of `rows`."""

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        outputs: dict[str, StoredOutput] = {}
        for role in shapes:
            kind = role.partition("_")[2]
            if kind == "scale":
                chain = Chain((*rows(problem, role), *float32(problem)))
                outputs[role] = StoredOutput(role, (AtLeast(LEAST_SCALE),), chain)
            elif kind != "input":
                outputs[role] = StoredOutput(role, chain=Chain(weights(problem, role)))
        return outputs

    return build
