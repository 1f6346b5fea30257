"""The batched form under Triton's interpreter; run by `test_interpreter` in a process of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.warpwise_launches import WarpwiseTile
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import ActivationFormat
from moectl.kernels.triton.marlin import TILES
from moectl.kernels.triton.sort_and_combine import INTERPRETED
from moectl.problem.moe_problem import Dims
from support import batch_cases as cases
from support import kernel_cases
from support.random_layers import GPT_OSS, KIMI, QWEN, inputs_of, judged, random_layer, skipping

SMALL = {
    "mxfp4": replace(GPT_OSS, dims=Dims(96, 64), experts=4, local_experts=4, top_k=2),
    "int4": replace(KIMI, dims=Dims(96, 64), experts=4, local_experts=4, top_k=2),
}

LAUNCHES = {
    **kernel_cases.LAUNCHES,
    "warpwise": Launch("warpwise", WarpwiseTile(8, 1, 2, 2, 2, 2)),
    "warpwise fused": Launch("warpwise", WarpwiseTile(8, 1, 1, 2, 1, 2, 1)),
    "warpwise without a plan": Launch("warpwise", WarpwiseTile(8, 0, 1, 4, 2, 4)),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cases.poison_new_memory(monkeypatch)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


@pytest.mark.parametrize("name", cases.COUNTS)
@pytest.mark.parametrize(("experts", "most"), [(1, 1), (5, 3), (7, 300), (33, 4)])
def test_lists_rows(name: str, experts: int, most: int) -> None:
    cases.lists_rows(name, experts, most, "cpu")


@pytest.mark.parametrize("launch", LAUNCHES)
def test_agrees(launch: str) -> None:
    """Two of the counts for each launch, which take turns."""
    problem = SMALL["int4" if launch.startswith("warpwise") else "mxfp4"]
    turn = list(LAUNCHES).index(launch)
    for name in (cases.COUNTS[turn % 5], cases.COUNTS[(turn + 2) % 5]):
        cases.agrees(problem, LAUNCHES[launch], name, 3, "cpu")


@pytest.mark.parametrize("name", cases.COUNTS)
def test_marlin_agrees(name: str) -> None:
    cases.agrees(QWEN, TILES[cases.COUNTS.index(name) % len(TILES)][2], name, 3, "cpu")


@pytest.mark.parametrize("most", [0, 1, 20])
def test_the_runner_chooses_by_the_size_of_the_batch(most: int) -> None:
    cases.agrees(SMALL["mxfp4"], None, "uneven", most, "cpu")


def test_router_weights_on_the_input_are_nobodys_business_here() -> None:
    routing = replace(SMALL["int4"].routing, weight_on_input=True)
    problem = replace(SMALL["int4"], routing=routing)
    cases.agrees(problem, LAUNCHES["grouped 16x64x64"], "uneven", 3, "cpu")


def test_writes_no_other_rows() -> None:
    cases.writes_no_other_rows(SMALL["mxfp4"], LAUNCHES["grouped 16x64x64"])
    cases.writes_no_other_rows(SMALL["int4"], LAUNCHES["warpwise"])


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("backend", ["moectl", "moectl_marlin"])
def test_a_layers_kernel_in_this_form(backend: str, on_input: bool) -> None:
    """Tokens are batched, computed and put back in their order: the layer's output."""
    base = replace(QWEN, top_k=1) if on_input else QWEN
    problem = replace(base, routing=replace(QWEN.routing, weight_on_input=on_input))
    layer = random_layer(problem)
    prepared = layer.prepared(backend, "cpu")
    inputs = skipping(inputs_of(problem, 5), every=4)
    kernel = FusedMoEKernel(prepared, runner_for(backend), ActivationFormat.BATCHED)
    result = judged(layer, prepared, kernel.run(inputs), inputs)
    assert result.ok, result
