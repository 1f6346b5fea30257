"""The same call gives the same bits: again and again, on two streams, in a graph, on poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from devtools.inspection.shipped_kernels import covering_tiles

from moectl.kernels.choice.launch import Launch
from moectl.kernels.layer_inputs import LayerInputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.triton_runner import FAMILIES, run_with
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import MXFP8, NVFP4, Scheme
from support.random_layers import GPT_OSS, KIMI, QWEN, canonical_roles, inputs_of, layer_of

pytestmark = pytest.mark.gpu

LAYERS: dict[str, MoEProblem] = {
    "gpt-oss": replace(GPT_OSS, dims=Dims(2880, 1440), experts=8, local_experts=8),
    "kimi": replace(KIMI, dims=Dims(2048, 1024), experts=16, local_experts=16),
    "qwen": replace(QWEN, dims=Dims(2048, 768), experts=16, local_experts=16, top_k=8),
    "nvfp4": replace(QWEN, dims=Dims(2048, 768), experts=16, local_experts=16, top_k=8, scheme=Scheme(NVFP4)),
    "mxfp8": replace(KIMI, dims=Dims(2048, 1024), experts=16, local_experts=16, scheme=Scheme(MXFP8)),
}
TOKENS = (1, 7, 48, 300)
REPETITIONS = 100
SHARES = 2
"""Among how many layers the kinds of a family's tiles are divided; further layers begin again."""


@dataclass(frozen=True)
class Case:
    """A layer, a launch of one family and a call that the family is for."""

    layer: PreparedMoE
    launch: Launch
    inputs: LayerInputs

    def run(self) -> torch.Tensor:
        return run_with(self.layer, self.inputs.x, self.inputs.ids, self.inputs.weights, self.launch)


@lru_cache(maxsize=1)
def layer(name: str) -> PreparedMoE:
    roles = {role: t.cuda() for role, t in canonical_roles(LAYERS[name]).items()}
    return layer_of(LAYERS[name], roles).prepared("moectl", "cuda")


def tiles_of(name: str, family: str) -> list[Any]:
    """The first and last tile of a family that fit a layer, and its share of those of each kind."""
    problem, kernel_family = LAYERS[name], FAMILIES[family]
    tiles = [tile for tile in kernel_family.candidates(problem) if not kernel_family.fits(problem, tile)]
    share = covering_tiles(tiles)[list(LAYERS).index(name) % SHARES :: SHARES]
    return list(dict.fromkeys((*tiles[:1], *tiles[-1:], *share)))


def cases(name: str, family: str) -> Iterator[Case]:
    """`tiles_of` a layer, at every number of tokens near what the family is for."""
    problem, kernel_family = LAYERS[name], FAMILIES[family]
    if not kernel_family.runs_on(torch.device("cuda")):
        pytest.skip(f"the {family} kernels are for other GPUs")
    tiles = tiles_of(name, family)
    if not tiles:
        pytest.skip(f"the {family} kernels do not fit the {name} layer")
    fewest, most = kernel_family.tokens_per_expert
    near = [n for n in TOKENS if fewest / 8 <= n * problem.top_k / problem.experts <= most * 2]
    assert near, f"no number of tokens is near what the {family} kernels are for"
    for tile, tokens in product(tiles, near):
        yield Case(layer(name), Launch(family, tile), inputs_of(problem, tokens, device="cuda"))


def poison_cached_memory(word: int) -> None:
    """Leaves memory full of `word` to the next allocations; -1 and 0x7fffffff are NaN in bf16 and fp32."""
    sizes = [1 << 10] * 64 + [1 << 18] * 64 + [1 << 21] * 32 + [1 << 26] * 8
    held = [torch.full((size // 4,), word, dtype=torch.int32, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    del held


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_hundred_repetitions_on_poisoned_memory(name: str, family: str) -> None:
    for case in cases(name, family):
        first = case.run()
        assert torch.isfinite(first).all(), case.launch
        for repetition in range(REPETITIONS):
            if repetition % 25 == 0:
                poison_cached_memory(-1 if repetition % 50 else 0x7FFFFFFF)
            assert same_bits(first, case.run()), (case.launch, len(case.inputs.x), repetition)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LAYERS)
def test_two_streams_at_once(name: str, family: str) -> None:
    for case in cases(name, family):
        others = replace(case, inputs=replace(case.inputs, x=case.inputs.x.flip(0).contiguous() * 2))
        expected = case.run(), others.run()
        torch.cuda.synchronize()
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        results: list[list[torch.Tensor]] = [[], []]
        for _ in range(20):
            for stream, call, into in zip(streams, (case, others), results, strict=True):
                with torch.cuda.stream(stream):
                    into.append(call.run())
        torch.cuda.synchronize()
        for wanted, got in zip(expected, results, strict=True):
            assert all(same_bits(wanted, y) for y in got), (case.launch, len(case.inputs.x))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_gives_what_the_call_gives(name: str, family: str) -> None:
    for case in cases(name, family):
        eager = case.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = case.run()
        y.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(eager, y), (case.launch, len(case.inputs.x))


def other_routings(inputs: LayerInputs, experts: int) -> Iterator[torch.Tensor]:
    """Ids as unlike as can be: none at all, all tokens on the last experts, few, and those of the inputs."""
    ids = inputs.ids
    yield torch.full_like(ids, -1)
    yield torch.arange(experts - 1, experts - 1 - ids.shape[1], -1, device=ids.device).int().expand_as(ids)
    yield torch.where(torch.arange(len(ids), device=ids.device)[:, None] % 5 == 4, ids, experts + 3)
    yield ids.flip(1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_follows_another_routing(name: str, family: str) -> None:
    for case in cases(name, family):
        now = replace(case, inputs=replace(case.inputs, ids=case.inputs.ids.clone()))
        now.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = now.run()
        for ids in other_routings(case.inputs, LAYERS[name].experts):
            now.inputs.ids.copy_(ids)
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            eager = replace(case, inputs=replace(case.inputs, ids=ids.contiguous())).run()
            assert torch.isfinite(y).all() and same_bits(eager, y), (case.launch, len(case.inputs.x))
            if not ((ids >= 0) & (ids < LAYERS[name].experts)).any():
                assert not y.any()
