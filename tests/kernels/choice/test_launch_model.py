"""The model of launch times: its terms, and measured launches that it must rank."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import geometric_mean

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.environment.named_devices import (
    find_device,
    gpu_names,
    lowest_matrix_rate,
    published_bandwidth,
    published_matrix_rate,
)
from moectl.kernels.choice.expert_load import expert_counts, token_tiles_of
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_model import (
    FITTED_MATRIX_RATE,
    GemmWork,
    GpuRates,
    load_of,
    predicted_us,
    work_of,
)
from moectl.kernels.choice.launch_plan import SIZES, launch_for, planned
from moectl.kernels.choice.launch_shape import GemmShape, LaunchShape
from moectl.kernels.triton.triton_runner import (
    _rates_of,
    bandwidth_of,
    predicted_for,
)
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.published_layers import SCHEMES
from support.launch_cases import (
    EXTREME_GPUS,
    FORMATS,
    H20,
    H100,
    H200,
    IN_4_BITS,
    IN_ROWS,
    LAYER,
    ON_SM90,
    PORTABLE_ONES,
    RATES,
    SETTLED,
    extreme_layers,
    known_launches,
    measured_cells,
    shape_of,
)


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
    for _, shape in known_launches(LAYER):
        work = _work(LAYER, 1, shape)
        assert work.bytes == pytest.approx(6 * nbytes)
        assert work.programs == pytest.approx(6 * math.ceil(2 * 1536 / shape.gemms[0].rows))


def test_further_token_tiles_read_the_weights_again() -> None:
    """A share of them is from memory; tiles that hold all tokens of an expert read them once."""
    each, wide = (LaunchShape("any", known_launches(LAYER)[0][1].gemms, widths) for widths in ((), (256,)))
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
    each = LaunchShape("stream 1 each", (known_launches(LAYER)[0][1].gemms), ())
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
    for launch, shape in known_launches(LAYER):
        whole, share, nothing = (
            predicted_us(it, 1, launch.family, shape, H200)
            for it in (one, rank, replace(rank, experts=1 << 20))
        )
        assert whole and share and nothing and share - nothing < (whole - nothing) / 8


def _predicted(problem: MoEProblem, gpu: GpuRates) -> list[list[float]]:
    """Microseconds of every launch at every size."""
    times = [
        [predicted_us(problem, m, launch.family, shape, gpu) for m in SIZES]
        for launch, shape in known_launches(problem)
    ]
    return [[us for us in each if us is not None] for each in times]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gpu", [H200, H100, H20], ids=["h200", "h100", "h20"])
def test_predictions_are_times(format: str, gpu: GpuRates) -> None:
    problem = replace(LAYER, scheme=SCHEMES[format])
    shape = known_launches(problem)[0][1]
    floors = [1e6 * _work(problem, m, shape).bytes / gpu.bandwidth for m in SIZES]
    for times in _predicted(problem, gpu):
        assert len(times) == len(SIZES) and all(map(math.isfinite, times))
        assert all(us > floor for us, floor in zip(times, floors, strict=True))


def test_more_bandwidth_never_costs_time() -> None:
    slow, fast = _predicted(LAYER, H100), _predicted(LAYER, H200)
    assert all(
        a <= b for quick, late in zip(fast, slow, strict=True) for a, b in zip(quick, late, strict=True)
    )


TOKEN_EDGE = 0.7
"""Least time of twice the tokens: a token more may be another tile, of fewer tokens each on average."""


@settings(max_examples=40, deadline=None)
@given(extreme_layers(), EXTREME_GPUS, st.integers(1, 1 << 18))
def test_extreme_layers_and_gpus_have_times_that_grow(
    problem: MoEProblem, gpu: GpuRates, tokens: int
) -> None:
    floor = 1e6 * _work(problem, tokens, known_launches(problem)[0][1]).bytes / gpu.bandwidth
    for launch, shape in known_launches(problem):

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


@pytest.mark.parametrize("name", ["h200", "h100", "h800", "gh200", "a GPU that nobody knows"])
def test_gpus_with_the_matrix_rate_of_measured_ones_are_predicted_as_before(name: str) -> None:
    """`matrix` is exactly 1: no prediction has changed by it."""
    known = name if name.startswith("a GPU") else find_device(name).name
    assert GpuRates.of_gpu(known, 132, 4.8e12, ON_SM90) == H200


@pytest.mark.parametrize(
    ("variant", "gpu"),
    [("NVIDIA H20-4x", "h20"), ("NVIDIA H100 96GB HBM3", "h100"), ("NVIDIA H800 PCIe X", "h800-pcie")],
)
def test_a_variant_with_other_memory_has_the_matrix_rate_of_its_gpu(variant: str, gpu: str) -> None:
    device = find_device(gpu)
    assert published_matrix_rate(variant) == published_matrix_rate(device.name) > 0
    assert published_bandwidth(variant) == 0


@pytest.mark.parametrize(
    ("name", "capability", "arch"),
    [
        ("NVIDIA A10G", (8, 6), "sm86"),  # its row has no matrix rate
        ("NVIDIA GeForce RTX 4080", (8, 9), "sm89"),  # it has no row
        ("NVIDIA GB200", (10, 0), "sm100"),  # its row has no number of multiprocessors
        ("NVIDIA B300 SXM6 AC", (10, 3), "sm100"),  # nor has any of its architecture
        ("NVIDIA GB300", (10, 3), "sm100"),
    ],
)
def test_a_matrix_rate_that_is_not_published_is_the_lowest_of_the_architecture(
    name: str, capability: tuple[int, int], arch: str
) -> None:
    assert published_matrix_rate(name) == 0
    alike = [device.name for device in map(find_device, gpu_names()) if device.arch == arch]
    lowest = min(rate for rate in map(published_matrix_rate, alike) if rate)
    assert lowest_matrix_rate(10 * capability[0] + capability[1]) == lowest
    assert GpuRates.of_gpu(name, 100, 1e12, capability).matrix == min(1.0, lowest / FITTED_MATRIX_RATE)


def test_consumers_gpus_do_not_have_the_matrix_rate_of_those_that_were_measured() -> None:
    assert GpuRates.of_gpu("NVIDIA A10G", 80, 6e11, (8, 6)).matrix < 0.12
    assert GpuRates.of_gpu("NVIDIA H20", 78, 4e12, (9, 0)).matrix < 0.26
    with compiling_for(replace(OFFLINE_GPUS[86], name="NVIDIA A10G")):
        assert _rates_of(torch.device("cuda")).matrix < 0.12


def test_an_architecture_older_than_every_published_one_has_no_matrix_rate() -> None:
    assert lowest_matrix_rate(60) == 0


@pytest.mark.parametrize("name", ["NVIDIA H2000", "NVIDIA", "", "NVIDIA-H", "h"])
def test_a_name_that_begins_with_no_gpu_s_has_no_matrix_rate(name: str) -> None:
    assert published_matrix_rate(name) == 0


@pytest.mark.parametrize(
    ("files", "cells", "most", "within"),
    [
        (IN_4_BITS, 600, 1.018, (0.78, 0.95)),
        (SETTLED, 400, 1.015, (0.8, 0.95)),
        (IN_ROWS, 430, 1.008, (0.91, 0.99)),
        (PORTABLE_ONES, 216, 1.01, (0.88, 0.97)),
    ],
)
def test_choices_among_measured_launches_are_near_the_fastest(
    files: str, cells: int, most: float, within: tuple[float, float]
) -> None:
    ratios = []
    for (gpu, *_, tokens), rows in measured_cells(files).items():
        problem = rows[0][0]
        shapes = [(launch.family, shape_of(problem, launch)) for _, launch, _ in rows]
        times = [predicted_us(problem, tokens, *launch, RATES[gpu]) or math.inf for launch in shapes]
        ratios.append(rows[times.index(min(times))][2] / min(us for _, _, us in rows))
    assert len(ratios) >= cells
    shares = [sum(ratio <= limit for ratio in ratios) / len(ratios) for limit in (1.03, 1.1)]
    assert geometric_mean(ratios) < most and shares[0] > within[0] and shares[1] > within[1], (
        geometric_mean(ratios),
        shares,
    )


def test_a_launch_has_a_predicted_time_where_its_family_was_fitted() -> None:
    device = torch.device("cuda")
    with compiling_for(OFFLINE_GPUS[90]):
        found = planned(LAYER, _rates_of(device), ON_SM90)
        assert found is not None
        us = predicted_for(LAYER, 1, found.launches[0], device)
        assert us is not None and 0 < us < 1000
        portable = launch_for(LAYER, 1)
        slower = predicted_for(LAYER, 1, portable, device)
        assert slower is not None and us < slower < 5 * us
        assert predicted_for(LAYER, 1, found.launches[0], torch.device("cpu")) is None
    with compiling_for(OFFLINE_GPUS[80]):
        with_fewer = predicted_for(LAYER, 1, portable, device)
        assert with_fewer is not None and with_fewer > slower


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
