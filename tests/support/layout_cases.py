"""Layers to lay out in tests: every layout, format, row order and a few awkward sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from moectl.convert.canonical import canonical_shapes
from moectl.convert.layouts.registry import LAYOUTS, Chain, WeightLayout
from moectl.convert.steps.transforms import DTYPES
from moectl.problem.moe_problem import SILU, Activation, Dims, MoEProblem
from moectl.problem.padding import size_rule
from moectl.problem.schemes import (
    A16,
    FP8_TENSOR,
    FULL,
    NVFP4,
    NVFP4_ACT,
    ActFormat,
    Scheme,
    WeightFormat,
)

SIZES = ((288, 96), (96, 416), (128, 32), (352, 192))
ROWS = ("interleaved", "concatenated", "single")
"""Orders of gate and up rows; a single matrix has none."""

STATIC = ActFormat("fp8", 8, (FULL, FULL), dynamic=False)
_ACTS = {NVFP4: NVFP4_ACT, FP8_TENSOR: STATIC}


def problem_for(
    layout: WeightLayout, weight: WeightFormat, rows: str, hidden: int, intermediate: int, experts: int = 2
) -> MoEProblem:
    """A layer of about these sizes that `layout` can hold, with padded sizes set."""
    gated = rows != "single"
    unit = weight.group if weight.block[0] == 1 and weight.group > 0 else 2
    rule = size_rule(layout.name, weight, gated)
    hidden, intermediate = (
        max(1, round(size / step)) * step
        for size, step in (
            (hidden, math.lcm(rule.needs.hidden, unit)),
            (intermediate, math.lcm(rule.needs.intermediate, unit)),
        )
    )
    problem = MoEProblem(
        Dims(hidden, intermediate),
        experts,
        2,
        Scheme(weight, _ACTS.get(weight, A16)),
        SILU if gated else Activation("relu2", gated=False),
        rows=rows if gated else "concatenated",
        bias=layout.bias,
    )
    return layout.pad(problem)


def random_bytes(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Tensor:
    """A tensor of random bytes read as `dtype`, so that NaNs and negative zeros occur."""
    kind = DTYPES[dtype]
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (math.prod(shape) * kind.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(kind).reshape(shape)


def canonical_tensors(problem: MoEProblem, seed: int = 0, alike: bool = False) -> dict[str, Tensor]:
    """Random canonical tensors of every role, of numbers that every layout can hold.

    `alike`: gate and up have the same scale, where there is one for a matrix.
    """
    tensors = {}
    for i, (role, (dtype, shape)) in enumerate(canonical_shapes(problem, problem.experts).items()):
        t = random_bytes(shape, dtype, seed + i)
        kind = role.partition("_")[2]
        if t.is_floating_point():
            t = torch.randn(shape, generator=torch.Generator().manual_seed(seed + i)).to(t.dtype)
        elif problem.scheme.weight.name in LARGEST.get(kind, {}):
            t = t % (1 + LARGEST[kind][problem.scheme.weight.name])
        tensors[role] = t[:, :1].expand(shape).contiguous() if alike and shape[1:] == (2, 1) else t
    return tensors


LARGEST = {"zero": {"int4": 15}, "scale": {"nvfp4": 126, "mxfp4": 249}}
"""The largest byte of a role, by weight format; E4M3 scales are no NaN and not negative."""


def same(a: Tensor, b: Tensor) -> bool:
    """True when both hold the same bytes in the same shape."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of `t`, flat."""
    return t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unpadded(problem: MoEProblem) -> MoEProblem:
    """The layer whose logical sizes are `problem`'s padded ones."""
    dims = problem.dims
    return replace(problem, dims=Dims(dims.padded_hidden, dims.padded_intermediate))


def tensors_for(layout: WeightLayout, problem: MoEProblem, seed: int = 0) -> dict[str, Tensor]:
    """Random canonical tensors that `layout` holds without quantizing them again."""
    tensors = canonical_tensors(problem, seed, alike=layout.name in ONE_SCALE)
    return without_lowest(problem, tensors) if lacks_lowest(layout) else tensors


def lacks_lowest(layout: WeightLayout) -> bool:
    """Whether `layout` holds no lowest code."""
    return "-e0m" in layout.name


def without_lowest(problem: MoEProblem, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` whose codes are odd, and so none the lowest."""
    digits = 0x11 if problem.scheme.weight.bits == 4 else 0x01
    return tensors | {role: t | digits for role, t in tensors.items() if role in ("w13", "w2")}


ONE_SCALE = {
    *("trtllm-fp8-tensor", "cutlass-fp8-tensor", "plain-fp8"),
    *("aiter-fp8", "humming-fp8", "humming-fp8-sm100", "humming-nvfp4", "humming-nvfp4-sm100"),
}
"""Layouts with one scale for gate and up."""


def stored(layout: WeightLayout, problem: MoEProblem, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every stored tensor of the layer `tensors` in `layout`."""
    recipe = layout.recipe(problem)
    return dict(recipe.store(tensors, recipe.update_statistics(tensors, {})))


def moved(layout: WeightLayout, problem: MoEProblem) -> Iterator[tuple[str, Chain, Tensor]]:
    """The chain of every stored tensor that has one, and what it moves: random numbers after value steps."""
    tensors, recipe = tensors_for(layout, problem), layout.recipe(problem)
    statistics = recipe.update_statistics(tensors, {})
    for name, output in recipe.outputs.items():
        if output.chain.steps:
            yield name, output.chain, replace(output, chain=Chain()).apply(tensors, statistics)


def back(chain: Chain, t: Tensor, like: Tensor) -> Tensor:
    """`t` undone to the shape and dtype of `like`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return chain.undo(t, names[like.dtype], tuple(like.shape))


def covering_pairs(cases: Sequence[tuple[WeightLayout, WeightFormat, str]]) -> set[int]:
    """Indices of cases in which every two of layout, format and rows that occur together in some case do so.

    Greedy: each is the first of those that add the most pairs which the others do not have.
    """
    pairs = [
        {(layout.name, str(weight)), (layout.name, rows), (str(weight), rows)}
        for layout, weight, rows in cases
    ]
    left, chosen = set().union(*pairs), set[int]()
    while left:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen


_PRODUCT = [
    (layout, weight, rows)
    for layout in LAYOUTS
    for weight in layout.weights
    for rows in ROWS
    if rows != "single" or layout.ungated
]
_BY_DEFAULT = covering_pairs(_PRODUCT)

EVERY_LAYOUT = [
    pytest.param(
        *case,
        id="-".join((case[0].name, str(case[1]), case[2])).replace(" ", "_"),
        marks=() if i in _BY_DEFAULT else pytest.mark.slow,
    )
    for i, case in enumerate(_PRODUCT)
]
"""Every layout with each of its formats and orders of rows; those that add no pair are slow tests."""


def third_of_layouts(first: int) -> list[ParameterSet]:
    """`EVERY_LAYOUT`, of which every third case from `first` on runs by default."""
    return [
        case if place % 3 == first else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        for place, case in enumerate(EVERY_LAYOUT)
    ]
