"""Stored tensors that several kernels share: NVFP4 and FP8 with their scales and numbers per expert.

Each function makes a layout's `Build` of the steps for its weights, padding and row order included.
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
from .weight_layout import Build, LayoutOptions

Steps = Callable[[MoEProblem, str], tuple[Step, ...]]

LEAST_SCALE = 1e-10
"""Block scales below make FlashInfer's FP8 kernels return NaN."""


def _float32(problem: MoEProblem) -> tuple[Step, ...]:
    dtype = scale_dtype(problem)
    return () if dtype == "F32" else (Widen(dtype),)


def nvfp4(weights: Steps, scales: Steps, *, inputs: str) -> Build:
    """Weights and E4M3 scales by their steps, one global scale of weights and one of activations per expert.

    `inputs`: the activations' is the ``layer``'s largest for all experts, or each ``expert``'s own.
    """

    def build(problem: MoEProblem, shapes: Shapes, options: LayoutOptions) -> Mapping[str, StoredOutput]:
        made: dict[str, StoredOutput] = {}
        for role in shapes:
            kind = role.partition("_")[2]
            both = halves(problem, role)
            if kind == "global":
                made[role] = StoredOutput(role, (PerExpert("first", both),))
            elif kind == "input":
                of = LayerMaximum(role) if inputs == "layer" else PerExpert("largest", both)
                made[role] = StoredOutput(role, (of,))
            else:
                steps = scales if kind == "scale" else weights
                made[role] = StoredOutput(role, chain=Chain(steps(problem, role)))
        return made

    return build


def fp8_tensor(weights: Steps) -> Build:
    """Weights by their steps, one scale per expert and one of static activations for the layer."""

    def build(problem: MoEProblem, shapes: Shapes, options: LayoutOptions) -> Mapping[str, StoredOutput]:
        made: dict[str, StoredOutput] = {}
        for role in shapes:
            kind = role.partition("_")[2]
            both = halves(problem, role)
            again = options.requantize and both == 2
            if kind == "scale":
                take = PerExpert("requantized" if again else "same", both)
                made[role] = StoredOutput(role, (take,), Chain(_float32(problem)))
            elif kind == "input":
                made[role] = StoredOutput(role, (LayerMaximum(role),), per_layer=True)
            else:
                values = (Requantize(f"{role}_scale"),) if again and not kind else ()
                made[role] = StoredOutput(role, values, Chain(weights(problem, role)))
        return made

    return build


def fp8_block(weights: Steps, rows: Steps) -> Build:
    """Weights by their steps; F32 block scales, at least `LEAST_SCALE`, in the order of `rows`."""

    def build(problem: MoEProblem, shapes: Shapes, options: LayoutOptions) -> Mapping[str, StoredOutput]:
        made: dict[str, StoredOutput] = {}
        for role in shapes:
            kind = role.partition("_")[2]
            if kind == "scale":
                chain = Chain((*rows(problem, role), *_float32(problem)))
                made[role] = StoredOutput(role, (AtLeast(LEAST_SCALE),), chain)
            elif kind != "input":
                made[role] = StoredOutput(role, chain=Chain(weights(problem, role)))
        return made

    return build
