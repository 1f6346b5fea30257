"""The model of launch times: its terms, the launches that layers take, and measured ones it must rank."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for

from moectl.kernels.triton.launch_model import GpuRates, coefficients, expert_counts, predicted_us, terms
from moectl.kernels.triton.launch_plan import MOST_GEMM_BINARIES, SIZES, FittedLaunch, plan
from moectl.kernels.triton.launch_shape import LaunchShape
from moectl.kernels.triton.launch_table import GpuModel, own_rows
from moectl.kernels.triton.launches import Launch, launch_for
from moectl.kernels.triton.triton_runner import (
    FAMILIES,
    _planned,
    bandwidth_of,
    choose_shipped,
    launch_of,
    plan_for,
    predicted_for,
)
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.published_layers import SCHEMES

DOCS = Path(__file__).parents[3] / "docs"
H200, H100 = GpuRates(132, 4.8e12), GpuRates(132, 3.35e12)
RATES = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
ON_SM90 = (9, 0)
LAYER = MoEProblem(Dims(2560, 1536), 64, 6, SCHEMES["int4-g128"])
"""A layer without rows in the shipped table."""


def _known(problem: MoEProblem) -> list[tuple[Launch, LaunchShape]]:
    return [
        (Launch(name, tile), family.shape(problem, tile))
        for name, family in FAMILIES.items()
        if family.shape is not None and coefficients().format_for(name, problem.scheme.weight)
        for tile in family.candidates(problem)
        if not family.fits(problem, tile)
    ]


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(64, 6, 1), (64, 6, 40), (8, 2, 16384), (512, 10, 3000), (4, 4, 7)]
)
def test_counts_of_an_expert_add_up(experts: int, top_k: int, tokens: int) -> None:
    counts, chances = expert_counts(experts, top_k, [tokens])
    share = top_k / experts
    assert float((counts * chances).sum()) == pytest.approx(tokens * share, rel=0.01)
    active = 1 - (1 - share) ** tokens
    assert float((chances * (counts > 0)).sum()) == pytest.approx(active, rel=0.01)


def test_terms_of_one_token_are_those_of_its_experts() -> None:
    launches = _known(LAYER)
    work = terms(LAYER, [1], [shape for _, shape in launches])
    nbytes = LAYER.scheme.weight.nbytes(2 * 1536, 2560)
    assert float(work.gemms[0].bytes[0, 0]) == pytest.approx(6 * nbytes)
    for (_, shape), programs in zip(launches, work.gemms[0].programs[0].tolist(), strict=True):
        assert programs == pytest.approx(6 * math.ceil(2 * 1536 / shape.gemms[0].rows))


def test_a_rank_of_many_has_programs_without_work() -> None:
    """Its grid is for all assignments, of which a share is its own."""
    rank = replace(LAYER, local_experts=8)
    each = LaunchShape("stream 1 each", (_known(LAYER)[0][1].gemms), ())
    work = terms(rank, [16], [each]).gemms[0]
    rows = math.ceil(2 * 1536 / each.gemms[0].rows)
    assert float(work.programs) == pytest.approx(16 * 6 * 8 / 64 * rows)
    assert float(work.idle) == pytest.approx(16 * 6 * (1 - 8 / 64) * rows)


@pytest.mark.parametrize("format", ["mxfp4", "int4-g32", "int4-g128", "nvfp4"])
@pytest.mark.parametrize("gpu", [H200, H100, GpuRates(78, 4e12)], ids=["h200", "h100", "h20"])
def test_predictions_are_times(format: str, gpu: GpuRates) -> None:
    problem = replace(LAYER, scheme=SCHEMES[format])
    launches = [(launch.family, shape) for launch, shape in _known(problem)]
    us = predicted_us(problem, SIZES, launches, gpu)
    assert us.shape == (len(SIZES), len(launches)) and bool(torch.isfinite(us).all())
    floor = torch.tensor([terms(problem, [m], [launches[0][1]]).gemms[0].bytes.item() for m in SIZES])
    assert bool((us.min(1).values > 1e6 * floor / gpu.bandwidth).all())


def test_more_bandwidth_never_costs_time() -> None:
    launches = [(launch.family, shape) for launch, shape in _known(LAYER)]
    slow, fast = (predicted_us(LAYER, SIZES, launches, gpu) for gpu in (H100, H200))
    assert bool((fast <= slow).all())


def _measured_cells() -> dict[tuple[str, str, str, int], list[tuple[MoEProblem, Launch, float]]]:
    cells = defaultdict(list)
    for path in sorted(DOCS.glob("launches_*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            launch = launch_of(row["family"], row["tile"])
            if launch is None or "us" not in row or FAMILIES[launch.family].shape is None:
                continue
            problem = MoEProblem(
                Dims(row["hidden"], row["intermediate"]),
                row["experts"],
                row["top_k"],
                SCHEMES[row["format"]],
                local_experts=row["local_experts"],
            )
            cells[row["gpu"], row["name"], row["format"], row["tokens"]].append((problem, launch, row["us"]))
    return {cell: rows for cell, rows in cells.items() if len(rows) > 2}


def test_choices_among_measured_launches_are_near_the_fastest() -> None:
    ratios = []
    for (gpu, *_, tokens), rows in _measured_cells().items():
        problem = rows[0][0]
        shapes = [
            (launch.family, FAMILIES[launch.family].shape(problem, launch.tile)) for _, launch, _ in rows
        ]
        us = predicted_us(problem, [tokens], shapes, RATES[gpu])[0]
        ratios.append(rows[int(us.argmin())][2] / min(us for _, _, us in rows))
    assert len(ratios) >= 400
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    within = [sum(ratio <= limit for ratio in ratios) / len(ratios) for limit in (1.03, 1.1)]
    assert mean < 1.02 and within[0] > 0.83 and within[1] > 0.95, (mean, within)


def test_planned_launches_are_near_the_fastest_where_they_were_measured() -> None:
    ratios = []
    for (gpu, *_, tokens), rows in _measured_cells().items():
        planned = _planned(rows[0][0], RATES[gpu], ON_SM90)
        assert planned is not None
        times = [us for _, launch, us in rows if launch == planned.launch(tokens)]
        ratios += [times[0] / min(us for _, _, us in rows)] if times else []
    assert len(ratios) >= 300
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert mean < 1.03 and sum(ratio > 1.2 for ratio in ratios) <= 5 and max(ratios) < 1.45, sorted(ratios)[
        -6:
    ]


@pytest.mark.parametrize("format", ["mxfp4", "int4-g32", "int4-g128", "nvfp4"])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "local", "top_k"),
    [(7168, 256, 384, 384, 8), (4096, 14336, 8, 8, 2), (2880, 2880, 32, 4, 4), (2048, 512, 512, 512, 10)],
)
def test_a_plan_has_few_launches_and_all_of_them_run(
    format: str, hidden: int, intermediate: int, experts: int, local: int, top_k: int
) -> None:
    problem = MoEProblem(Dims(hidden, intermediate), experts, top_k, SCHEMES[format], local_experts=local)
    planned = _planned(problem, H100, ON_SM90)
    assert planned is not None
    launches = set(planned.launches)
    assert sum(1 if getattr(it.tile, "fused", 0) else 2 for it in launches) <= MOST_GEMM_BINARIES
    assert list(planned.most) == sorted(set(planned.most)) and planned.most[-1] == SIZES[-1]
    for launch in launches:
        assert not FAMILIES[launch.family].fits(problem, launch.tile)
    assert planned.launch(1) == planned.launches[0] and planned.launch(1 << 20) == planned.launches[-1]
    assert all(planned.launch(most) == it for most, it in zip(planned.most, planned.launches, strict=True))


def test_formats_and_gpus_that_were_not_fitted_have_no_plan() -> None:
    assert _planned(replace(LAYER, scheme=SCHEMES["fp8-block"]), H200, ON_SM90) is None
    assert _planned(LAYER, GpuRates(108, 2e12), (8, 0)) is None
    assert plan(LAYER, H200, ()) is None


def test_a_plan_without_a_launch_for_some_tokens_is_none() -> None:
    few = [
        FittedLaunch(launch, shape, FAMILIES[launch.family].tokens_per_expert)
        for launch, shape in _known(LAYER)
        if launch.family == "stream"
    ]
    assert plan(LAYER, H200, few) is None


def test_a_layer_of_the_table_takes_its_own_rows_and_another_one_its_plan() -> None:
    own = MoEProblem(Dims(2048, 768), 128, 8, SCHEMES["int4-g128"])
    device = torch.device("cuda")
    with compiling_for(OFFLINE_GPUS[90]):
        for tokens in (1, 16, 1000):
            row = next(own_rows(own, tokens, GpuModel(ON_SM90, 132)))
            assert choose_shipped(own, tokens, device) == launch_of(row.family, row.tile)
            assert not list(own_rows(LAYER, tokens, GpuModel(ON_SM90, 132)))
            planned = plan_for(LAYER, device)
            assert planned is not None and choose_shipped(LAYER, tokens, device) == planned.launch(tokens)


def test_a_launch_has_a_predicted_time_where_its_family_was_fitted() -> None:
    device = torch.device("cuda")
    with compiling_for(OFFLINE_GPUS[90]):
        planned = plan_for(LAYER, device)
        assert planned is not None
        us = predicted_for(LAYER, planned.most[0], planned.launches[0], device)
        assert us == pytest.approx(planned.us[0], rel=0.5)
        assert predicted_for(LAYER, 1, launch_for(LAYER, 1), device) is None
        assert predicted_for(LAYER, 1, planned.launches[0], torch.device("cpu")) is None
    with compiling_for(OFFLINE_GPUS[80]):
        assert predicted_for(LAYER, 1, planned.launches[0], device) is None


def test_bandwidth_is_that_of_the_name_or_the_device() -> None:
    class About:
        name = "NVIDIA H200"
        memory_clock_rate = 2_619_000
        memory_bus_width = 5120

    assert bandwidth_of(About()) == 4.8e12
    About.name = "a GPU that nobody knows"
    assert bandwidth_of(About()) == pytest.approx(3.352e12, rel=1e-3)
    About.memory_bus_width = 0
    assert bandwidth_of(About()) == 3.35e12
