"""The model of launch times: its terms, the launches that layers take, and measured ones it must rank."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.capabilities.own_kernels import ROW_FORMATS
from moectl.environment.named_devices import find_device, published_bandwidth, published_matrix_rate
from moectl.kernels.choice import launch_plan
from moectl.kernels.choice.expert_load import expert_counts, token_tiles_of
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_model import (
    GemmWork,
    GpuRates,
    fitted,
    load_of,
    predicted_us,
    work_of,
)
from moectl.kernels.choice.launch_plan import (
    MOST_BINARIES,
    MOST_IF_MEASURED,
    SIZES,
    CandidateLaunch,
    Plan,
    plan,
    planned,
)
from moectl.kernels.choice.launch_shape import GemmShape, LaunchShape
from moectl.kernels.choice.launch_table import (
    GpuModel,
    MeasuredLaunch,
    entries,
    own_rows,
    tokens_per_expert,
)
from moectl.kernels.choice.tma_launches import TMA_TILES, tile_for
from moectl.kernels.triton.launches import launch_for
from moectl.kernels.triton.triton_runner import (
    FAMILIES,
    _rates_of,
    bandwidth_of,
    choose,
    choose_shipped,
    launch_of,
    predicted_for,
)
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.published_layers import SCHEMES

DOCS = Path(__file__).parents[3] / "docs"
H200, H100 = GpuRates(132, 4.8e12), GpuRates(132, 3.35e12)
H20 = GpuRates.of(78, 4e12, published_matrix_rate("NVIDIA H20"))
RATES = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
ON_SM90 = (9, 0)
FORMATS = tuple(SCHEMES)

LAYER = MoEProblem(Dims(2560, 1536), 64, 6, SCHEMES["int4-g128"])
"""A layer without rows in the shipped table."""


def _at(plan: Plan, tokens: int) -> Launch:
    """A plan's launch for a number of tokens, which it has."""
    launch = plan.launch(tokens)
    assert launch is not None
    return launch


def _known(problem: MoEProblem) -> list[tuple[Launch, LaunchShape]]:
    return [
        (Launch(name, tile), family.shape(problem, tile))
        for name, family in FAMILIES.items()
        if family.shape is not None
        for tile in family.candidates(problem)
        if not family.fits(problem, tile) and fitted(name, family.shape(problem, tile), problem.scheme.weight)
    ]


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(64, 6, 1), (64, 6, 40), (8, 2, 16384), (512, 10, 3000), (4, 4, 7)]
)
def test_counts_of_an_expert_add_up(experts: int, top_k: int, tokens: int) -> None:
    counts, chances = expert_counts(experts, top_k, tokens)
    share = top_k / experts
    total = sum(count * chance for count, chance in zip(counts, chances, strict=True))
    assert total == pytest.approx(tokens * share, rel=0.01)
    assert min(counts) > 0 and sum(chances) == pytest.approx(1 - (1 - share) ** tokens, rel=0.01)


def test_tiles_cover_an_experts_tokens() -> None:
    for widths, even in [((8,), False), ((16, 32, 48, 64), False), ((32, 64, 80, 96, 112, 128), True)]:
        for tokens in range(1, 300):
            tiles, width = token_tiles_of(tokens, widths, even)
            assert tiles == math.ceil(tokens / widths[-1]) and tokens <= width <= tiles * widths[-1]
    assert token_tiles_of(5, (), even=False) == (5, 5)
    assert token_tiles_of(65, (16, 32, 48, 64), even=False) == (2, 80)
    assert token_tiles_of(130, (32, 64, 80, 96, 112, 128), even=True) == (2, 160)


def _work(problem: MoEProblem, tokens: int, shape: LaunchShape) -> GemmWork:
    return work_of(load_of(problem, tokens), shape).gemms[0]


def test_work_of_one_token_is_that_of_its_experts() -> None:
    nbytes = LAYER.scheme.weight.nbytes(2 * 1536, 2560)
    for _, shape in _known(LAYER):
        work = _work(LAYER, 1, shape)
        assert work.bytes == pytest.approx(6 * nbytes)
        assert work.programs == pytest.approx(6 * math.ceil(2 * 1536 / shape.gemms[0].rows))


def test_further_token_tiles_read_the_weights_again() -> None:
    """A share of them is from memory; tiles that hold all tokens of an expert read them once."""
    each, wide = (LaunchShape("any", _known(LAYER)[0][1].gemms, widths) for widths in ((), (256,)))
    nbytes = LAYER.scheme.weight.nbytes(2 * 1536, 2560)
    active = 64 * (1 - (1 - 6 / 64) ** 40)
    assert _work(LAYER, 40, each).again == pytest.approx((40 * 6 - active) * nbytes, rel=1e-3)
    assert _work(LAYER, 40, wide).again == pytest.approx(0, abs=1e-3 * nbytes)


def test_columns_that_do_not_fill_a_step_are_computed_all_the_same() -> None:
    steps = {4: 2, 2: 3, 8: 1}
    for step, count in steps.items():
        gemm = GemmShape("any", 128, step)
        first, second = work_of(
            load_of(replace(LAYER, dims=Dims(2560, 384)), 64), LaunchShape("any", (gemm, gemm), (16,))
        ).gemms
        assert (second.steps, second.tiles) == (count, 2 * count * step)
        assert (first.steps, first.tiles) == (40 / step, 2 * 40)


def test_a_rank_of_many_has_programs_without_work() -> None:
    """Its grid is for all assignments, of which a share is its own."""
    rank = replace(LAYER, local_experts=8)
    each = LaunchShape("stream 1 each", (_known(LAYER)[0][1].gemms), ())
    work = _work(rank, 16, each)
    rows = math.ceil(2 * 1536 / each.gemms[0].rows)
    assert work.programs == pytest.approx(16 * 6 * 8 / 64 * rows)
    assert work.idle == pytest.approx(16 * 6 * (1 - 8 / 64) * rows)


def test_a_rank_without_a_token_has_nothing_to_wait_for() -> None:
    """One of 64 experts gets the only token's one choice of them in one of 64 routings."""
    one = replace(LAYER, top_k=1)
    rank = replace(one, local_experts=1)
    assert load_of(one, 1).experts.busy == 1 and load_of(replace(rank, experts=1), 1).experts.busy == 1
    assert load_of(rank, 1).experts.busy == pytest.approx(1 / 64)
    assert load_of(rank, 2).experts.busy == pytest.approx(1 - (63 / 64) ** 2)
    for launch, shape in _known(LAYER):
        whole, share, nothing = (
            predicted_us(it, 1, launch.family, shape, H200)
            for it in (one, rank, replace(rank, experts=1 << 20))
        )
        assert whole and share and nothing and share - nothing < (whole - nothing) / 8


def _predicted(problem: MoEProblem, gpu: GpuRates) -> list[list[float]]:
    """Microseconds of every launch at every size."""
    times = [
        [predicted_us(problem, m, launch.family, shape, gpu) for m in SIZES]
        for launch, shape in _known(problem)
    ]
    return [[us for us in each if us is not None] for each in times]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gpu", [H200, H100, H20], ids=["h200", "h100", "h20"])
def test_predictions_are_times(format: str, gpu: GpuRates) -> None:
    problem = replace(LAYER, scheme=SCHEMES[format])
    shape = _known(problem)[0][1]
    floors = [1e6 * _work(problem, m, shape).bytes / gpu.bandwidth for m in SIZES]
    for times in _predicted(problem, gpu):
        assert len(times) == len(SIZES) and all(map(math.isfinite, times))
        assert all(us > floor for us, floor in zip(times, floors, strict=True))


def test_more_bandwidth_never_costs_time() -> None:
    slow, fast = _predicted(LAYER, H100), _predicted(LAYER, H200)
    assert all(
        a <= b for quick, late in zip(fast, slow, strict=True) for a, b in zip(quick, late, strict=True)
    )


@st.composite
def extreme_layers(draw: st.DrawFn) -> MoEProblem:
    """A share of a layer, from one group of columns and one expert to 25,000 columns and 1024 experts."""
    scheme = SCHEMES[draw(st.sampled_from(FORMATS))]
    group = max(scheme.weight.group, 128 if scheme == SCHEMES["fp8-block"] else 32)
    sizes = st.integers(1, 200).map(lambda groups: groups * group)
    experts = draw(st.integers(1, 8) | st.integers(1, 1024))
    ranks = draw(st.sampled_from([n for n in (1, 2, 3, 8, 64, 1024) if experts % n == 0]))
    top_k = draw(st.integers(1, min(experts, 32)))
    dims = Dims(draw(sizes), draw(sizes))
    return MoEProblem(dims, experts, top_k, scheme, local_experts=experts // ranks)


EXTREME_GPUS = st.builds(
    GpuRates, st.integers(1, 500), st.floats(5e10, 3e13), st.floats(0.1, 1.0) | st.just(1.0)
)
"""From a multiprocessor with a laptop's memory to several times an H200."""

TOKEN_EDGE = 0.7
"""Least time of twice the tokens: a token more may be another tile, of fewer tokens each on average."""


@settings(max_examples=40, deadline=None)
@given(extreme_layers(), EXTREME_GPUS, st.integers(1, 1 << 18))
def test_extreme_layers_and_gpus_have_times_that_grow(
    problem: MoEProblem, gpu: GpuRates, tokens: int
) -> None:
    floor = 1e6 * _work(problem, tokens, _known(problem)[0][1]).bytes / gpu.bandwidth
    for launch, shape in _known(problem):

        def us(
            tokens: int, gpu: GpuRates = gpu, launch: Launch = launch, shape: LaunchShape = shape
        ) -> float:
            time = predicted_us(problem, tokens, launch.family, shape, gpu)
            assert time is not None and 0 < time < math.inf, (launch, tokens)
            return time

        now = us(tokens)
        assert now > floor
        assert us(2 * tokens) > TOKEN_EDGE * now and us(8 * tokens) > 0.95 * now, launch
        assert us(tokens, gpu._replace(bandwidth=2 * gpu.bandwidth)) <= now
        assert us(tokens, gpu._replace(matrix=gpu.matrix / 2)) >= now


@settings(max_examples=40, deadline=None)
@given(extreme_layers(), EXTREME_GPUS)
def test_extreme_layers_and_gpus_have_plans_that_run(problem: MoEProblem, gpu: GpuRates) -> None:
    found = planned(problem, gpu, ON_SM90)
    assert found is not None
    assert found.most[-1] == SIZES[-1]
    for launch in found.launches:
        assert not FAMILIES[launch.family].fits(problem, launch.tile)


@pytest.mark.parametrize("name", ["h200", "h100", "h800", "gh200", "a GPU that nobody knows"])
def test_gpus_with_the_matrix_rate_of_measured_ones_are_predicted_as_before(name: str) -> None:
    """`matrix` is exactly 1: no prediction has changed by it."""
    known = name if name.startswith("a GPU") else find_device(name).name
    assert GpuRates.of(132, 4.8e12, published_matrix_rate(known)) == H200


@pytest.mark.parametrize(
    ("variant", "gpu"),
    [("NVIDIA H20-4x", "h20"), ("NVIDIA H100 96GB HBM3", "h100"), ("NVIDIA H800 PCIe X", "h800-pcie")],
)
def test_a_variant_with_other_memory_has_the_matrix_rate_of_its_gpu(variant: str, gpu: str) -> None:
    device = find_device(gpu)
    assert published_matrix_rate(variant) == published_matrix_rate(device.name) > 0
    assert published_bandwidth(variant) == 0


@pytest.mark.parametrize("name", ["NVIDIA H2000", "NVIDIA", "", "NVIDIA-H", "h"])
def test_a_name_that_begins_with_no_gpu_s_has_no_matrix_rate(name: str) -> None:
    assert published_matrix_rate(name) == 0


def test_a_lower_matrix_rate_bounds_prefill_and_leaves_decoding_alone() -> None:
    """An H20 has a quarter of an H200's rate per multiprocessor, and more than half of them."""
    for problem in (LAYER, replace(LAYER, dims=Dims(7168, 256), experts=384, local_experts=384, top_k=8)):
        sizes = 3 * problem.dims.hidden * problem.dims.intermediate
        found, fast = planned(problem, H20, ON_SM90), planned(problem, H20._replace(matrix=1.0), ON_SM90)
        assert found is not None and fast is not None
        for tokens in (4096, 16384):
            floor = 1e6 * 2 * tokens * problem.top_k * sizes / 148e12
            us, unbound = (_planned_us(problem, tokens, it, H20) for it in (found, fast))
            assert floor / 0.9 < us < floor / 0.6
            assert us <= unbound, "the plan takes the rate into account"
            assert us > 1.5 * _planned_us(problem, tokens, fast, H20._replace(matrix=1.0))
        one = _planned_us(problem, 1, found, H20)
        assert one < 1.07 * _planned_us(problem, 1, fast, H20._replace(matrix=1.0))


def _planned_us(problem: MoEProblem, tokens: int, plan: Plan, gpu: GpuRates) -> float:
    launch = _at(plan, tokens)
    shape = FAMILIES[launch.family].shape
    assert shape is not None
    us = predicted_us(problem, tokens, launch.family, shape(problem, launch.tile), gpu)
    assert us is not None
    return us


IN_4_BITS, IN_ROWS = "launches_h*.jsonl", "launches_tma_*.jsonl"
"""Recorded launches."""


def _measured_cells(files: str) -> dict[tuple[str, str, str, int], list[tuple[MoEProblem, Launch, float]]]:
    cells = defaultdict(list)
    for path in sorted(DOCS.glob(files)):
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


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


@pytest.mark.parametrize(
    ("files", "cells", "most", "within"),
    [(IN_4_BITS, 490, 1.018, (0.79, 0.95)), (IN_ROWS, 90, 1.01, (0.9, 0.98))],
)
def test_choices_among_measured_launches_are_near_the_fastest(
    files: str, cells: int, most: float, within: tuple[float, float]
) -> None:
    ratios = []
    for (gpu, *_, tokens), rows in _measured_cells(files).items():
        problem = rows[0][0]
        shapes = [
            (launch.family, FAMILIES[launch.family].shape(problem, launch.tile)) for _, launch, _ in rows
        ]
        times = [predicted_us(problem, tokens, *launch, RATES[gpu]) or math.inf for launch in shapes]
        ratios.append(rows[times.index(min(times))][2] / min(us for _, _, us in rows))
    assert len(ratios) >= cells
    shares = [sum(ratio <= limit for ratio in ratios) / len(ratios) for limit in (1.03, 1.1)]
    assert _mean(ratios) < most and shares[0] > within[0] and shares[1] > within[1], (_mean(ratios), shares)


@pytest.mark.parametrize(
    ("files", "cells", "most", "over", "worst"),
    [(IN_4_BITS, 290, 1.03, 4, 1.28), (IN_ROWS, 80, 1.03, 1, 1.28)],
)
def test_planned_launches_are_near_the_fastest_where_they_were_measured(
    files: str, cells: int, most: float, over: int, worst: float
) -> None:
    ratios = []
    for (gpu, *_, tokens), rows in _measured_cells(files).items():
        found = planned(rows[0][0], RATES[gpu], ON_SM90)
        assert found is not None
        times = [us for _, launch, us in rows if launch == found.launch(tokens)]
        ratios += [times[0] / min(us for _, _, us in rows)] if times else []
    assert len(ratios) >= cells
    assert _mean(ratios) < most and sum(ratio > 1.2 for ratio in ratios) <= over, _mean(ratios)
    assert max(ratios) < worst, sorted(ratios)[-9:]


def test_planned_launches_of_layers_in_rows_take_less_time_than_those_by_rules() -> None:
    """Where both were measured, although they are fewer."""
    gains = []
    for (gpu, *_, tokens), rows in _measured_cells(IN_ROWS).items():
        problem = rows[0][0]
        found = planned(problem, RATES[gpu], ON_SM90)
        assert found is not None
        us = {launch: us for _, launch, us in rows}
        ruled = tile_for(problem, tokens_per_expert(problem, tokens))
        planned_us, ruled_us = us.get(_at(found, tokens)), us.get(Launch("tma", ruled))
        gains += [ruled_us / planned_us] if planned_us and ruled_us else []
    assert len(gains) > 70 and _mean(gains) > 1.01 and min(gains) > 0.85, (_mean(gains), sorted(gains)[:9])


def _gemms(problem: MoEProblem, plan: Plan) -> set[object]:
    """What is compiled of launches: one kernel for a fused one's GEMMs, and one for GEMMs that are alike.

    `tma` has kernels of their own for one token.
    """
    gemms: set[object] = set()
    for size in SIZES:
        launch = _at(plan, size)
        shape = FAMILIES[launch.family].shape
        assert shape is not None
        name, (first, second), *_ = shape(problem, launch.tile)
        kind = name, launch.family == "tma" and size == 1
        if getattr(launch.tile, "fused", 0):
            gemms.add((kind, first, second))
        else:
            gemms |= {(kind, "first", first), (kind, "second", second)}
    return gemms


def _small(problem: MoEProblem) -> int:
    """Compiled kernels of a layer beside its GEMMs."""
    return TMA_TILES.small_binaries(problem) if problem.scheme.weight.name in ROW_FORMATS else 3


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "local", "top_k"),
    [(7168, 256, 384, 384, 8), (4096, 14336, 8, 8, 2), (2880, 2880, 32, 4, 4), (2048, 512, 512, 512, 10)],
)
def test_a_plan_has_few_launches_and_all_of_them_run(
    format: str, hidden: int, intermediate: int, experts: int, local: int, top_k: int
) -> None:
    problem = MoEProblem(Dims(hidden, intermediate), experts, top_k, SCHEMES[format], local_experts=local)
    found = planned(problem, H100, ON_SM90)
    assert found is not None
    launches = set(found.launches)
    assert len(_gemms(problem, found)) <= MOST_BINARIES - _small(problem)
    assert list(found.most) == sorted(set(found.most)) and found.most[-1] == SIZES[-1]
    for launch in launches:
        assert not FAMILIES[launch.family].fits(problem, launch.tile)
    assert found.launch(1) == found.launches[0] and found.launch(1 << 20) == found.launches[-1]
    assert all(found.launch(most) == it for most, it in zip(found.most, found.launches, strict=True))


def _candidate(launch: Launch, shape: LaunchShape) -> CandidateLaunch:
    return CandidateLaunch(launch, shape, FAMILIES[launch.family].tokens_per_expert)


def test_gpus_that_were_not_fitted_have_no_plan() -> None:
    assert planned(LAYER, GpuRates(108, 2e12), (8, 0)) is None
    assert plan(LAYER, H200, ()) is None


def test_a_plan_ends_where_no_launch_suits() -> None:
    few = [_candidate(launch, shape) for launch, shape in _known(LAYER) if launch.family == "stream"]
    found = plan(LAYER, H200, few)
    assert found is not None and 32 <= found.most[-1] < 64
    assert found.launch(found.most[-1]) == found.launches[-1]
    assert found.launch(found.most[-1] + 1) is None and found.launch(1 << 20) is None
    many = [_candidate(launch, shape) for launch, shape in _known(LAYER) if launch.family == "prefill"]
    assert plan(LAYER, H200, many) is None


def test_rows_at_other_numbers_of_tokens_than_are_compared_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = planned.__wrapped__(LAYER, H200, ON_SM90)
    launch = without.launches[-1]
    row = MeasuredLaunch(100, launch.family, asdict(launch.tile), 1.0)
    monkeypatch.setattr(launch_plan, "own_rows", lambda problem, gpu: (row,))
    assert planned.__wrapped__(LAYER, H200, ON_SM90) == without


OF_THE_TABLE = {
    f"{entry.weight} {entry.hidden}x{entry.intermediate}x{entry.experts}": MoEProblem(
        Dims(entry.hidden, entry.intermediate),
        entry.experts,
        entry.top_k,
        next(s for s in SCHEMES.values() if str(s.weight) == entry.weight),
    )
    for entry in entries()
    if entry.gpu == GpuModel(ON_SM90, 132)
}


@pytest.mark.parametrize("gpu", [H200, H100], ids=["h200", "h100"])
@pytest.mark.parametrize("name", OF_THE_TABLE)
def test_layers_of_the_table_take_their_rows_or_what_shares_binaries_and_is_near(
    name: str, gpu: GpuRates
) -> None:
    problem = OF_THE_TABLE[name]
    found = planned(problem, gpu, ON_SM90)
    assert found is not None and len(_gemms(problem, found)) <= MOST_IF_MEASURED - _small(problem)
    own = {
        row.tokens: launch
        for row in own_rows(problem, GpuModel(ON_SM90, 132))
        if (launch := launch_of(row.family, row.tile))
    }
    others = {tokens: launch for tokens, launch in own.items() if found.launch(tokens) != launch}
    assert len(own) >= 8 and len(others) <= len(own) / 2
    assert found.launch(1) == own[1]
    for tokens, launch in others.items():
        us, measured = (
            predicted_us(problem, tokens, it.family, _shape(problem, it), gpu)
            for it in (_at(found, tokens), launch)
        )
        assert us is not None and measured is not None and us < 1.1 * measured, (tokens, us, measured)


@pytest.mark.parametrize("gpu", [H200, H100], ids=["h200", "h100"])
@pytest.mark.parametrize("name", OF_THE_TABLE)
def test_rows_decide_at_their_numbers_of_tokens_and_the_model_between_them(name: str, gpu: GpuRates) -> None:
    """Rows once held from half as many tokens to nearly twice as many, and lost a third there."""
    problem = OF_THE_TABLE[name]
    found = planned(problem, gpu, ON_SM90)
    assert found is not None
    known = _known(problem)
    for tokens in (11, 45, 181, 300, 362, 428, 724, 870, 1448, 1717, 2598, 2896, 5793):
        per_expert = tokens_per_expert(problem, tokens)
        times = {
            launch: us
            for launch, shape in known
            if _candidate(launch, shape).suits(tokens, per_expert)
            if (us := predicted_us(problem, tokens, launch.family, shape, gpu))
        }
        taken = _at(found, tokens)
        us = predicted_us(problem, tokens, taken.family, _shape(problem, taken), gpu)
        assert us is not None and us < 1.16 * min(times.values()), (tokens, taken, us, min(times.values()))


def test_what_was_measured_is_taken_and_shared_only_if_there_are_too_many() -> None:
    """Where a row says that a launch is the fastest, it is, whatever the model says."""
    candidates = [_candidate(launch, shape) for launch, shape in _known(LAYER)]
    slow = next(i for i, it in enumerate(candidates) if it.launch.family == "stream")
    rows = {1: slow, 2: slow, 4: slow}
    found, without = plan(LAYER, H200, candidates, rows), plan(LAYER, H200, candidates)
    assert found is not None and without is not None
    assert {found.launch(tokens) for tokens in (1, 2, 4)} == {candidates[slow].launch}
    assert without.launch(1) != candidates[slow].launch
    assert len(_gemms(LAYER, found)) <= MOST_IF_MEASURED - _small(LAYER)
    assert len(_gemms(LAYER, without)) <= MOST_BINARIES - _small(LAYER)


def test_layers_take_their_plan() -> None:
    device = torch.device("cuda")
    with compiling_for(OFFLINE_GPUS[90]):
        for problem in (LAYER, OF_THE_TABLE["int4 group 128 2048x768x128"]):
            found = planned(problem, _rates_of(device), ON_SM90)
            assert found is not None
            for tokens in (1, 16, 1000):
                assert choose_shipped(problem, tokens, device) == found.launch(tokens)


def _shape(problem: MoEProblem, launch: Launch) -> LaunchShape:
    shape = FAMILIES[launch.family].shape
    assert shape is not None
    return shape(problem, launch.tile)


def test_a_launch_has_a_predicted_time_where_its_family_was_fitted() -> None:
    device = torch.device("cuda")
    with compiling_for(OFFLINE_GPUS[90]):
        found = planned(LAYER, _rates_of(device), ON_SM90)
        assert found is not None
        us = predicted_for(LAYER, found.most[0], found.launches[0], device)
        assert us is not None and 0 < us < 1000
        assert predicted_for(LAYER, 1, launch_for(LAYER, 1), device) is None
        assert predicted_for(LAYER, 1, found.launches[0], torch.device("cpu")) is None
    with compiling_for(OFFLINE_GPUS[80]):
        assert predicted_for(LAYER, 1, found.launches[0], device) is None


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


MOST_CHOICE_SECONDS, MOST_PLAN_SECONDS = 1e-3, 60e-3
"""Of a CPU core's time: for a number of tokens that a planned layer has not had, and for the plan."""


def test_a_new_number_of_tokens_costs_less_than_a_millisecond_and_a_plan_little_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the layer takes launches of its plan or its own rows, and nothing is remembered by tokens."""
    monkeypatch.setenv("MOECTL_CACHE", str(tmp_path))
    own = MoEProblem(Dims(2048, 768), 128, 8, SCHEMES["int4-g128"])
    device, draw = torch.device("cuda"), random.Random(0)
    with compiling_for(OFFLINE_GPUS[90]):
        for problem in (LAYER, own):
            choose(problem, 1, device)  # plans it
            seconds = []
            for tokens in draw.sample(range(2, 16385), 400):
                begin = time.thread_time()
                choose(problem, tokens, device)
                seconds.append(time.thread_time() - begin)
            assert statistics.median(seconds) < MOST_CHOICE_SECONDS
        seconds = []
        for extra in range(1, 8):
            layer = replace(LAYER, dims=Dims(2560, 1536 + 128 * extra))  # none that was planned before
            begin = time.thread_time()
            choose(layer, 64, device)
            seconds.append(time.thread_time() - begin)
        assert statistics.median(seconds) < MOST_PLAN_SECONDS, seconds
