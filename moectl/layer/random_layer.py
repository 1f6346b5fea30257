"""Layers with random weights, random tokens and random routings, generated on the device from seeds.

Weights are drawn expert by expert, so that a layer can be generated in several layouts with the same values,
and decoded again for a few experts. Nothing is written to disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..convert.canonical import canonical_shapes
from ..convert.recipe.recipe import Recipe, StoredOutput
from ..kernels.layer_inputs import random_logits
from ..kernels.prepared_layer import CANONICAL, local_ids
from ..kernels.reference import moe_reference
from ..problem.moe_problem import MoEProblem
from ..seeds import seed_of
from ..torch_dtypes import MODEL_TORCH_DTYPES, TORCH_DTYPES
from .experts import ExpertLayer, Ids


@dataclass(frozen=True)
class RandomRouting:
    """One routing: int32 `ids`, -1 for experts of other ranks, and fp32 `weights` ``[tokens, top_k]``."""

    ids: Tensor
    weights: Tensor


def routings(
    problem: MoEProblem, tokens: int, distribution: str, count: int, device: torch.device
) -> list[RandomRouting]:
    """`count` random routings of `tokens` tokens, deterministic for one device.

    With expert parallelism they are the routings as seen by the first rank.
    """
    generator = torch.Generator(device).manual_seed(seed_of("routings", tokens))
    result = []
    for _ in range(count):
        ids = random_logits(problem, tokens, distribution, generator).topk(problem.top_k).indices
        weights = torch.randn(tokens, problem.top_k, generator=generator, device=device)
        local = local_ids(ids.int(), 0, problem.local_experts)
        result.append(RandomRouting(local, torch.softmax(weights, -1)))
    return result


def tokens_of(problem: MoEProblem, tokens: int, device: torch.device) -> Tensor:
    """``[tokens, hidden]`` random input in the model's dtype."""
    generator = torch.Generator(device).manual_seed(seed_of("tokens", tokens))
    x = torch.randn(tokens, problem.dims.hidden, generator=generator, device=device)
    return x.to(MODEL_TORCH_DTYPES[problem.dtype])


@dataclass(frozen=True)
class RandomLayer:
    """A layer of `problem` with random weights on `device`, for any backend's layout."""

    problem: MoEProblem
    device: torch.device

    @cached_property
    def experts(self) -> ExpertLayer:
        """The layer as an `ExpertLayer`, which can be prepared for any backend."""
        shapes = canonical_shapes(self.problem, self.problem.local_experts)
        recipe = Recipe(shapes, {role: StoredOutput(role) for role in shapes})
        return ExpertLayer(self.problem, 0, CANONICAL, recipe, self.canonical, self._stored, router=None)

    def canonical(self, ids: Ids, device: torch.device | None = None) -> dict[str, Tensor]:
        """Canonical roles ``[len(ids), ...]`` of the experts `ids`, on `device`, the layer's by default."""
        shapes = canonical_shapes(self.problem, 1)
        drawn: dict[str, Tensor] = {}
        for role, (dtype, shape) in shapes.items():
            out = torch.empty(len(ids), *shape[1:], dtype=TORCH_DTYPES[dtype], device=self.device)
            for i, expert in enumerate(map(int, ids)):
                generator = torch.Generator(self.device).manual_seed(seed_of(role, expert))
                self._draw(role, out[i], generator)
            drawn[role] = out.to(device or self.device)
        return drawn

    def _stored(self, device: torch.device) -> dict[str, Tensor]:
        return self.canonical(range(self.problem.local_experts), device)

    def _draw(self, role: str, out: Tensor, generator: torch.Generator) -> None:
        """Fills one expert's `role` such that GEMM outputs have a variance of about one."""
        matrix, _, kind = role.partition("_")
        k = self.problem.dims.hidden if matrix == "w13" else self.problem.dims.intermediate
        DRAWN[kind](out, generator, self.problem, k)

    def reference(self, x: Tensor, routed: RandomRouting, rows: list[int]) -> Tensor:
        """The fp32 reference output of the tokens `rows` of `x`."""
        index = torch.tensor(rows, device=self.device)
        selected = x[index], routed.ids[index], routed.weights[index]
        return moe_reference(*selected, self.experts.reference, self.problem)


def _codes(out: Tensor, generator: torch.Generator, problem: MoEProblem, k: int) -> None:
    """Random codes of packed formats; normally distributed numbers for 16-bit and FP8 weights."""
    grid = problem.scheme.weight.number.grid
    if grid.rms:
        out.random_(0, 256, generator=generator)
        return
    numbers = torch.empty(out.shape, device=out.device).normal_(generator=generator)
    if out.dtype != torch.uint8:
        out.copy_(numbers / math.sqrt(k))
    else:
        out.copy_(numbers.to(TORCH_DTYPES[grid.dtype]).view(torch.uint8))


def _scales(out: Tensor, generator: torch.Generator, problem: MoEProblem, k: int) -> None:
    """Scales around the value that gives unit variance; around 1 under a global scale."""
    number = problem.scheme.weight.number
    size = (number.grid.rms or 1.0) * math.sqrt(k)
    if number.byte_scale == "F8_E4M3":
        near = torch.empty(out.shape, device=out.device).uniform_(0.5, 1.5, generator=generator)
        out.copy_(near.to(torch.float8_e4m3fn).view(torch.uint8))
    elif out.dtype == torch.uint8:
        middle = 127 - round(math.log2(size))
        out.random_(middle - 1, middle + 2, generator=generator)
    else:
        out.uniform_(0.5 / size, 1.5 / size, generator=generator)


def _zeros(out: Tensor, generator: torch.Generator, problem: MoEProblem, k: int) -> None:
    middle = 1 << (problem.scheme.weight.bits - 1)
    out.random_(middle - 1, middle + 2, generator=generator)


def _globals(out: Tensor, generator: torch.Generator, problem: MoEProblem, k: int) -> None:
    out.fill_(1 / (problem.scheme.weight.number.grid.rms * math.sqrt(k)))


def _inputs(out: Tensor, generator: torch.Generator, problem: MoEProblem, k: int) -> None:
    """Static scales of 1/4: E4M3 then covers activations up to 112."""
    out.fill_(1 / 4)


def _biases(out: Tensor, generator: torch.Generator, problem: MoEProblem, k: int) -> None:
    out.normal_(0.0, 0.3, generator=generator)


DRAWN: Mapping[str, Callable[[Tensor, torch.Generator, MoEProblem, int], None]] = {
    "": _codes,
    "scale": _scales,
    "zero": _zeros,
    "global": _globals,
    "input": _inputs,
    "bias": _biases,
}
"""Generators of canonical roles, by the part of the role's name after the matrix."""
