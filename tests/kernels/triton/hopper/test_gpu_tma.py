"""The kernels of weights in rows on a GPU, on layers of every format: results, repetitions, graphs, NaN."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.layer_inputs import LayerInputs, make_inputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.tolerance import check
from moectl.kernels.triton.hopper.tma import PROMISING, TMA_FAMILY, TmaTile
from moectl.kernels.triton.triton_runner import run_with
from moectl.layer.experts import ExpertLayer
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Dims, MoEProblem
from support.kernel_cases import poison_new_memory
from support.random_layers import inputs_of
from support.row_cases import RELU2, SCHEMES, RowCase, call_of, expected_of, layer_of, tight

pytestmark = pytest.mark.gpu


def name_of(tile: TmaTile) -> str:
    return f"{tile.tokens}x{tile.workers}x{tile.blocks_m}, loaders {tile.loaders}, programs {tile.programs}"


FEW = ("8x1x1, loaders 2, programs 1", "64x2x2, loaders 2, programs 1", "160x2x1, loaders 4, programs 1")
EVERY = tuple(map(name_of, PROMISING))
W8A8 = (
    "block",
    "block, E8M0 scales",
    "channel and token",
    "tensor, static",
    "tensor, dynamic",
    "channel, static",
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    poison_new_memory(monkeypatch)


@cache
def experts_of(case: RowCase) -> tuple[ExpertLayer, PreparedMoE]:
    layer = layer_of(case.problem, "cuda")
    return layer, layer.prepared("moectl", "cuda")


def launch_of(prepared: PreparedMoE, name: str) -> Launch:
    tiles = TMA_FAMILY.candidates(prepared.problem)
    named = [tile for tile in tiles if name_of(tile) == name]
    if not named:
        pytest.skip(f"no tile {name} fits the layer")
    return Launch("tma", named[0])


def run(prepared: PreparedMoE, inputs: LayerInputs, launch: Launch) -> torch.Tensor:
    return run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


LAYER = RowCase("plain", "", (512, 384), spread=(8, 2), dtype="bf16")
ODD = (
    *(RowCase(scheme, "", (336, 208), SILU, (5, 2)) for scheme in ("plain", *W8A8)),
    *(
        RowCase(scheme, "", (352, 80), SWIGLU_OAI, (5, 3), True, rows="interleaved", dtype="bf16")
        for scheme in ("plain", "block", "channel and token", "tensor, static")
    ),
    *(
        RowCase(scheme, "", (208, 144), RELU2, (4, 1), True)
        for scheme in ("plain", "block", "tensor, dynamic")
    ),
    *(RowCase(scheme, "", (256, 272), SILU, (3, 1), on_input=True) for scheme in ("plain", "block")),
)


@pytest.mark.parametrize("tokens", [1, 19, 300])
@pytest.mark.parametrize("tile", EVERY)
@pytest.mark.parametrize("scheme", ["plain", "block", "channel and token"])
def test_every_tile_agrees(scheme: str, tile: str, tokens: int) -> None:
    case = replace(LAYER, scheme=scheme, tokens=tokens)
    layer, prepared = experts_of(replace(case, tokens=1))
    launch, inputs = launch_of(prepared, tile), call_of(case, "cuda")
    y = run(prepared, inputs, launch)
    result = check(y, expected_of(layer, inputs), tight(case.problem))
    assert result.ok, result
    assert same(y, run(prepared, inputs, launch)), "not repeatable"


@pytest.mark.parametrize("routing", ["uniform", "skipping", "crowded"])
@pytest.mark.parametrize("tile", FEW)
@pytest.mark.parametrize("case", ODD, ids=str)
def test_agrees_at_odd_sizes_and_routings(case: RowCase, tile: str, routing: str) -> None:
    layer, prepared = experts_of(case)
    inputs = call_of(replace(case, tokens=70, routing=routing), "cuda")
    y = run(prepared, inputs, launch_of(prepared, tile))
    result = check(y, expected_of(layer, inputs), tight(case.problem))
    assert result.ok, result


@pytest.mark.parametrize("tile", EVERY)
@pytest.mark.parametrize("scheme", ["plain", "block"])
def test_a_hundred_repetitions_and_a_graph_with_other_routings(scheme: str, tile: str) -> None:
    case = replace(LAYER, scheme=scheme)
    _, prepared = experts_of(case)
    launch = launch_of(prepared, tile)
    first, second = (make_inputs(case.problem, 61, seed, device="cuda") for seed in (1, 2))
    y = run(prepared, first, launch)
    assert all(same(y, run(prepared, first, launch)) for _ in range(100))
    x, ids, weights = first.x.clone(), first.ids.clone(), first.weights.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_with(prepared, x, ids, weights, launch)
    for inputs in (second, first):
        x.copy_(inputs.x)
        ids.copy_(inputs.ids)
        weights.copy_(inputs.weights)
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, run(prepared, inputs, launch))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tile", FEW)
@pytest.mark.parametrize("scheme", ["plain", "block", "channel and token", "tensor, static"])
def test_what_is_not_finite_stays_in_its_row(scheme: str, tile: str, value: float) -> None:
    case = replace(LAYER, scheme=scheme)
    _, prepared = experts_of(case)
    launch, inputs = launch_of(prepared, tile), inputs_of(case.problem, 23, device="cuda")
    clean = run(prepared, inputs, launch)
    x = inputs.x.clone()
    x[2, 37] = value
    y = run(prepared, replace(inputs, x=x), launch)
    others = [i for i in range(23) if i != 2]
    assert same(y[others], clean[others])
    if scheme != "tensor, static" or value != value:  # a static scale saturates infinity
        assert not torch.isfinite(y[2]).any()


@pytest.mark.parametrize("hidden", [2048, 4096, 7168, 16384])
@pytest.mark.parametrize("tile", FEW)
@pytest.mark.parametrize("scheme", W8A8)
def test_long_sums_of_unlike_magnitudes_are_as_exact_as_in_fp32(scheme: str, tile: str, hidden: int) -> None:
    """Codes of very different sizes in one sum, which tensor cores add with fewer bits than fp32.

    The largest numbers of `h` are further from the others here: where one of them takes the next code, an
    element moves by more than `tight` allows: the largest was 0.226. Sums in too few bits would move all of
    them, which the RMS of the whole and of the worst token show.
    """
    problem = MoEProblem(Dims(hidden, 256), 2, 1, SCHEMES[scheme], SILU)
    layer = layer_of(problem, "cuda")
    prepared = layer.prepared("moectl", "cuda")
    inputs = inputs_of(problem, 64, device="cuda")
    spread = torch.exp2(torch.randint(-6, 7, inputs.x.shape, device="cuda").float()) / 16
    inputs = replace(inputs, x=(inputs.x * spread).to(inputs.x.dtype))
    y = run(prepared, inputs, launch_of(prepared, tile))
    result = check(y, expected_of(layer, inputs), replace(tight(problem), max=0.35))
    assert result.ok, result
