"""Layers to lay out in tests: every layout, format, row order and a few awkward sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moectl.convert.canonical import canonical_shapes
from moectl.convert.layout import LAYOUTS, Chain, WeightLayout
from moectl.convert.transforms import DTYPES
from moectl.padding import size_rule
from moectl.problem import Dims, MoEProblem
from moectl.schemes import FULL, Scheme, WeightFormat

SIZES = ((2880, 96), (96, 2880), (128, 32), (352, 192))


def problem_for(
    layout: WeightLayout, weight: WeightFormat, rows: str, hidden: int, intermediate: int, experts: int = 2
) -> MoEProblem:
    """A layer of about these sizes that `layout` can hold, with padded sizes set."""
    rule = size_rule(layout.name, weight)
    unit = 1 if weight.group == FULL else weight.group
    hidden, intermediate = (
        max(1, round(size / step)) * step
        for size, step in (
            (hidden, math.lcm(rule.needs.hidden, unit)),
            (intermediate, math.lcm(rule.needs.intermediate, unit)),
        )
    )
    problem = MoEProblem(Dims(hidden, intermediate), experts, 2, Scheme(weight), rows=rows, bias=layout.bias)
    return replace(problem, dims=layout.align(weight).apply(problem.dims))


def random_bytes(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Tensor:
    """A tensor of random bytes read as `dtype`, so that NaNs and negative zeros occur."""
    kind = DTYPES[dtype]
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (math.prod(shape) * kind.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(kind).reshape(shape)


def canonical_tensors(problem: MoEProblem, seed: int = 0) -> dict[str, Tensor]:
    """Random canonical tensors of every role; biases and float scales are numbers."""
    tensors = {}
    for i, (role, (shape, dtype)) in enumerate(canonical_shapes(problem, problem.experts).items()):
        t = random_bytes(shape, dtype, seed + i)
        if t.is_floating_point():
            t = torch.randn(shape, generator=torch.Generator().manual_seed(seed + i)).to(t.dtype)
        tensors[role] = t
    return tensors


def same(a: Tensor, b: Tensor) -> bool:
    """True when both hold the same bytes in the same shape."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of `t`, flat."""
    return t.contiguous().reshape(-1).view(torch.uint8)


def unpadded(problem: MoEProblem) -> MoEProblem:
    """The layer whose logical sizes are `problem`'s padded ones."""
    dims = problem.dims
    return replace(problem, dims=Dims(dims.padded_hidden, dims.padded_intermediate))


def stored(layout: WeightLayout, problem: MoEProblem, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every role of `tensors` in `layout`."""
    return {role: chain.apply(tensors[role]) for role, chain in layout.chains(problem).items()}


def back(chain: Chain, t: Tensor, like: Tensor) -> Tensor:
    """`t` undone to the shape and dtype of `like`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return chain.undo(t, tuple(like.shape), names[like.dtype])


EVERY_LAYOUT = [
    pytest.param(layout, weight, rows, id=f"{layout.name}-{weight}-{rows}".replace(" ", "_"))
    for layout in LAYOUTS
    for weight in layout.weights
    for rows in ("interleaved", "concatenated")
]
