"""The kernels on a GPU: every shipped launch at full width, odd sizes, graphs, the torch backend."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.portable_launches import DECODE, GROUPED
from moectl.kernels.layer_inputs import LayerInputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.kernels.tolerance import check, tolerance_for
from moectl.kernels.triton.triton_runner import run_with
from moectl.problem.moe_problem import Dims
from moectl.problem.schemes import Scheme, int_format
from support import kernel_cases as cases
from support.random_layers import GPT_OSS, KIMI, canonical_roles, inputs_of, layer_of
from support.runners import apply

pytestmark = pytest.mark.gpu

WIDE = {
    "gpt-oss": replace(GPT_OSS, dims=Dims(2880, 2880), experts=8, local_experts=8),
    "kimi": replace(KIMI, dims=Dims(7168, 2048), experts=8, local_experts=8),
    "qwen": replace(
        KIMI, dims=Dims(2048, 768), experts=8, local_experts=8, scheme=Scheme(int_format(4, 128))
    ),
}
SHIPPED = [Launch("decode", tile) for tile in DECODE] + [Launch("grouped", tile) for tile in GROUPED]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.poison_new_memory(monkeypatch)


@lru_cache(maxsize=1)
def wide_layers(family: str) -> tuple[PreparedMoE, PreparedMoE]:
    """The family's layer for the triton and the torch backend."""
    roles = {role: t.cuda() for role, t in canonical_roles(WIDE[family]).items()}
    layer = layer_of(WIDE[family], roles)
    return layer.prepared("moectl", "cuda"), layer.prepared("torch", "cuda")


@lru_cache(maxsize=4)
def expected(family: str, tokens: int) -> tuple[LayerInputs, torch.Tensor]:
    _, plain = wide_layers(family)
    inputs = inputs_of(plain.problem, tokens, device="cuda")
    y = moe_reference(inputs.x, inputs.ids, inputs.weights, plain.expert, plain.problem, dtype=torch.float64)
    return inputs, y


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("tokens", [1, 7, 40, 300])
def test_every_shipped_launch_at_full_width(family: str, tokens: int) -> None:
    prepared, plain = wide_layers(family)
    inputs, y = expected(family, tokens)
    tolerance = tolerance_for(prepared.problem)
    failed = []
    for launch in SHIPPED:
        if launch.family == "decode" and tokens > 40:
            continue
        first = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        second = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        result = check(first, y, tolerance)
        print(family, tokens, launch.tile, f"max {result.max:.2e} rms {result.rms:.2e}")
        if not result.ok or not torch.equal(first, second):
            failed.append((launch, result, torch.equal(first, second)))
    assert not failed
    result = check(apply(runner_for("torch"), plain, inputs.x, inputs.ids, inputs.weights), y, tolerance)
    print(family, tokens, "torch", f"max {result.max:.2e} rms {result.rms:.2e}")
    assert result.ok, result


@pytest.mark.parametrize("launch", cases.LAUNCHES)
@pytest.mark.parametrize("family", cases.ODD_SIZES)
def test_agrees_at_odd_sizes(family: str, launch: str) -> None:
    for tokens in (1, 21):
        cases.agrees(cases.ODD_SIZES[family], cases.LAUNCHES[launch], tokens, "cuda")


@pytest.mark.parametrize("launch", cases.LAUNCHES)
@pytest.mark.parametrize("case", [cases.skips, cases.crowds, cases.weighs_the_input, cases.one_rank])
def test_odd_routings(case: object, launch: str) -> None:
    case(cases.LAUNCHES[launch], "cuda")  # type: ignore[operator]


@pytest.mark.parametrize("launch", cases.LAUNCHES)
def test_every_scale_is_right(launch: str) -> None:
    cases.every_scale_is_right(cases.LAUNCHES[launch], "cuda")


def test_no_tokens_and_the_table() -> None:
    cases.no_tokens_and_the_table("cuda")


@pytest.mark.parametrize("tokens", [4, 300])
def test_a_captured_graph_follows_the_routing(tokens: int) -> None:
    prepared, _ = wide_layers("gpt-oss")
    run = partial(apply, runner_for("moectl"))
    problem = prepared.problem
    first, second = inputs_of(problem, tokens, device="cuda"), inputs_of(problem, tokens, device="cuda")
    second = replace(second, ids=torch.flip(second.ids, (0,)).contiguous(), x=second.x * 2)
    x, ids, weights = first.x.clone(), first.ids.clone(), first.weights.clone()
    run(prepared, x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(prepared, x, ids, weights)
    for inputs in (first, second):
        x.copy_(inputs.x)
        ids.copy_(inputs.ids)
        weights.copy_(inputs.weights)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, run(prepared, inputs.x, inputs.ids, inputs.weights))


def test_ids_out_of_range_are_skipped() -> None:
    prepared, _ = wide_layers("gpt-oss")
    for launch in SHIPPED:
        inputs = inputs_of(prepared.problem, 9, device="cuda")
        outside, skipped = inputs.ids.clone(), inputs.ids.clone()
        outside[::2, 1], skipped[::2, 1] = 1_000_000, -1
        a = run_with(prepared, inputs.x, outside, inputs.weights, launch)
        b = run_with(prepared, inputs.x, skipped, inputs.weights, launch)
        assert torch.equal(a, b)
