"""The moectl_marlin kernels on a GPU: every format and tile, at full width, in graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.kernels.tolerance import check, tolerance_for
from moectl.kernels.triton.marlin import tile_for
from moectl.problem.moe_problem import Dims
from support import marlin_cases as cases
from support.kernel_cases import poison_new_memory
from support.random_layers import canonical_roles, inputs_of, layer_of
from support.runners import apply

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize("tile", cases.TILES)
@pytest.mark.parametrize("name", cases.FORMATS)
def test_agrees_with_the_reference(name: str, tile: str) -> None:
    for tokens in (1, 5, 40):
        cases.agrees(cases.FORMATS[name], cases.TILES[tile], tokens, "cuda")


@pytest.mark.parametrize("tile", cases.TILES)
def test_skips_and_crowds(tile: str) -> None:
    cases.agrees(cases.of(32), cases.TILES[tile], 11, "cuda", skip=3)
    cases.crowds(cases.TILES[tile], "cuda")


@pytest.mark.parametrize("zero", [False, True])
def test_every_code_is_right(zero: bool) -> None:
    cases.every_code_is_right(zero, "cuda")


@pytest.mark.parametrize(("group", "dims"), [(32, Dims(7168, 2048)), (128, Dims(2048, 768))])
def test_full_width_and_graphs(group: int, dims: Dims) -> None:
    """What is replayed from a graph is what runs, at every number of tokens' own tile."""
    problem = cases.of(group, dims=dims, experts=8, local_experts=8, top_k=4)
    layer = layer_of(problem, {role: t.cuda() for role, t in canonical_roles(problem).items()})
    prepared, runner = layer.prepared("moectl_marlin", "cuda"), runner_for("moectl_marlin")
    for tokens in (1, 7, 40, 300):
        inputs = inputs_of(problem, tokens, device="cuda")
        # Ids past the experts are skipped as negative ones are.
        inputs = replace(inputs, ids=inputs.ids.clone())
        inputs.ids[-1, 0] = problem.experts
        eager = apply(runner, prepared, inputs.x, inputs.ids, inputs.weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = apply(runner, prepared, inputs.x, inputs.ids, inputs.weights)
        graph.replay()
        assert torch.equal(y.view(torch.int16), eager.view(torch.int16)), tile_for(problem, tokens)
        known = torch.where(inputs.ids < problem.experts, inputs.ids, -1)
        wanted = moe_reference(inputs.x, known, inputs.weights, layer.reference, problem, dtype=torch.float64)
        result = check(eager, wanted, tolerance_for(problem))
        assert result.ok, result
