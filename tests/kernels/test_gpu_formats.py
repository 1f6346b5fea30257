"""Every family of kernels over the grid of formats, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moectl.kernels.reference import moe_reference
from moectl.kernels.tolerance import check, tolerance_for
from moectl.kernels.triton.launch import Launch
from moectl.kernels.triton.runner import REGIMES, run_with
from moectl.padding import pad
from moectl.problem import SILU, Dims, MoEProblem
from moectl.schemes import WeightFormat

from . import kernel_cases as cases
from .grid import CASES, CHOICES, FORMATS, Case
from .layers import inputs_of, random_layer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.poison_new_memory(monkeypatch)


def taking(problem: MoEProblem, turn: int) -> Iterator[Launch]:
    """A launch of every family that runs here and takes `problem`, the `turn`-th of those tried."""
    problem, here = pad("moectl-mtile64", problem), torch.device("cuda")
    for name, regime in REGIMES.items():
        tiles = [launch.tile for launch in cases.LAUNCHES.values() if launch.regime == name]
        tiles = [tile for tile in tiles or regime.candidates(problem) if not regime.fits(problem, tile)]
        if tiles and regime.runs_on(here):
            yield Launch(name, tiles[turn % len(tiles)])


def test_every_family_takes_some_case() -> None:
    here = {name for name, regime in REGIMES.items() if regime.runs_on(torch.device("cuda"))}
    assert here == {launch.regime for case in CASES for launch in taking(case.problem, case.launch)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference(case: Case) -> None:
    known = list(taking(case.problem, case.launch))
    assert {"decode", "grouped"} <= {launch.regime for launch in known}
    for launch in known:
        cases.agrees_in(case, launch, "cuda")


@pytest.mark.parametrize("floats", CHOICES["floats"], ids=str)
@pytest.mark.parametrize("weight", FORMATS, ids=str)
def test_decodes_exactly(weight: WeightFormat, floats: tuple[str, str]) -> None:
    problem = cases.probe(weight, floats)
    for launch in taking(problem, 1):
        cases.decodes_exactly(weight, floats, launch, "cuda")


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(1024, 8, 33), (512, 22, 40)])
def test_many_experts(experts: int, top_k: int, tokens: int) -> None:
    problem = replace(
        CASES[0].problem, experts=experts, local_experts=experts, top_k=top_k, dims=Dims(64, 64)
    )
    layer = random_layer(problem)
    prepared = layer.prepared("triton", "cuda")
    inputs = inputs_of(problem, tokens, device="cuda")
    for launch in taking(problem, 0):
        y = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        expected = moe_reference(
            *(t.cpu() for t in (inputs.x, inputs.ids, inputs.weights)), layer.reference, problem
        )
        assert check(y.cpu(), expected, tolerance_for(problem)).ok, launch


def test_rows_beyond_32_bits() -> None:
    """65,536 tokens of width 7168 with top-k 8: three of the call's tensors have more than 2^31 numbers."""
    weight = FORMATS[1]
    problem = MoEProblem(
        Dims(7168, 256), 16, 8, replace(CASES[0].problem.scheme, weight=weight), SILU, bias=False
    )
    prepared = random_layer(problem).prepared("triton", "cuda")
    inputs = inputs_of(problem, 65_536, device="cuda")
    some = torch.tensor([0, 1, 30_000, 37_448, 37_449, 65_534, 65_535])
    x, ids, weights = (t[some].cpu() for t in (inputs.x, inputs.ids, inputs.weights))
    expected = moe_reference(x, ids, weights, lambda e: prepared.expert(e), problem)
    for launch in taking(problem, 1):
        if launch.regime == "decode":
            continue
        y = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        assert check(y[some].cpu(), expected, tolerance_for(problem)).ok, launch
