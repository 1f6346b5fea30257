"""Predicted times of the launches that ship, without a GPU, torch or triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for

from moectl.environment import find_device
from moectl.kernels.choice.launch_model import GpuRates, coefficients, predicted_us
from moectl.kernels.choice.launch_plan import TILE_FAMILIES, planned
from moectl.kernels.choice.predicted_times import predicted_times
from moectl.kernels.triton.triton_runner import bandwidth_of, choose_shipped, predicted_for
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from moectl.problem.published_layers import SCHEMES, model_problem
from moectl.problem.roofline import published_rates, roofline_time, uniform_work
from moectl.problem.schemes import (
    FP8_ACT_TOKEN,
    FULL,
    ActFormat,
    Scheme,
    WeightFormat,
    act_format,
    int_format,
)

TOKENS = (1, 8, 64, 512, 4096)
H200 = find_device("h200")


@pytest.mark.parametrize(
    "problem",
    [
        model_problem("gpt-oss-120b"),
        model_problem("kimi-k2").on(Parallel(tp=8)),
        MoEProblem(Dims(2560, 1536), 64, 6, SCHEMES["int4-g128"]),
        replace(model_problem("gpt-oss-20b"), local_experts=4),
        model_problem("qwen3-30b", "bf16"),
        model_problem("deepseek-v3", "fp8-block").on(Parallel(tp=8)),
    ],
    ids=["rows of its own", "slice", "without rows", "rank", "bf16", "fp8"],
)
def test_they_are_those_of_the_launches_that_run(problem: MoEProblem) -> None:
    """The host code chooses by the GPU that is there; nothing of it is needed to predict."""
    device = torch.device("cuda")
    with compiling_for(OFFLINE_GPUS[90]):
        chosen = [choose_shipped(problem, m, device) for m in TOKENS]
        wanted = [predicted_for(problem, m, it, device) for m, it in zip(TOKENS, chosen, strict=True)]
        about = torch.cuda.get_device_properties(device)
        there = replace(H200, sms=about.multi_processor_count, bandwidth=bandwidth_of(about))
    times = predicted_times(problem, there, TOKENS).times
    assert [time.family for time in times] == [launch.family for launch in chosen]
    assert [time.us for time in times] == pytest.approx(wanted)
    assert [time.tokens for time in times] == [*TOKENS]


def test_the_error_is_that_of_the_gpu_or_unknown() -> None:
    problem = model_problem("gpt-oss-120b")
    errors = coefficients().errors["stream"]
    assert set(errors) == {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}
    for name, error in errors.items():
        assert predicted_times(problem, find_device(name), (1,)).median_error == error
        assert 0 < error < 0.2
    h20 = predicted_times(problem, find_device("h20"), (64,))
    assert h20.median_error is None
    assert h20.times[0].us > predicted_times(problem, H200, (64,)).times[0].us


STANDS_FOR_ANOTHER = {
    "one scale for the tensor": (WeightFormat("fp8", 8, (FULL, FULL)), "fp8 per channel"),
    "zero points": (replace(int_format(4, 128), zero_point=True), "int4 group 128"),
    "another group": (int_format(4, 64), "int4 group 128"),
}


@pytest.mark.parametrize("name", STANDS_FOR_ANOTHER)
def test_times_of_a_format_that_another_stands_for_have_no_error(name: str) -> None:
    weight, measured = STANDS_FOR_ANOTHER[name]
    act = act_format("fp8", (1, FULL)) if weight.name == "fp8" else ActFormat()
    problem = MoEProblem(Dims(2048, 768), 128, 8, Scheme(weight, act))
    family = predicted_times(problem, H200, (64,)).times[0].family
    assert coefficients().format_for(f"{family} fp8" if family == "tma" else family, weight) == measured
    assert predicted_times(problem, H200, (64,)).median_error is None


RANKS = (Parallel(tp=2, ep=True), Parallel(tp=8, ep=True), Parallel(dp=16, ep=True), Parallel(dp=64, ep=True))


@pytest.mark.parametrize("gpu", ["h200", "h100", "a100"])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3", "gpt-oss-120b", "qwen3-30b", "kimi-k2"])
def test_no_time_with_expert_parallelism_is_below_the_roofline(model: str, gpu: str) -> None:
    device = find_device(gpu)
    whole = model_problem(model)
    for parallel in (ranks for ranks in RANKS if ranks.ep_size <= whole.experts):
        problem = whole.on(parallel)
        for time in predicted_times(problem, device, (1, 2, 8, 64, 300, 1024)).times:
            work = uniform_work(problem, time.tokens)
            least = roofline_time(work, published_rates(device, problem.scheme.act.name))
            assert time.us > 1e6 * least.seconds, (parallel, time)


def average_us(problem: MoEProblem, tokens: int, of: MoEProblem | None = None) -> float:
    """The time on average over ranks under the launch of `problem`: its own, or that of another layer."""
    rates = GpuRates.of_gpu(H200.name, H200.sms, H200.bandwidth, (9, 0))
    plan = planned(problem, rates, (9, 0))
    assert plan is not None
    launch = plan.launch(tokens)
    shape = TILE_FAMILIES[launch.family].shape(problem, launch.tile)
    us = predicted_us(of or problem, tokens, launch.family, shape, rates)
    assert us is not None
    return us


def test_one_token_for_ranks_of_one_expert_takes_what_a_layer_of_one_expert_does() -> None:
    whole = model_problem("mixtral-8x7b")
    rank = whole.on(Parallel(tp=8, ep=True))
    (time,) = predicted_times(rank, H200, (1,)).times
    alone = replace(whole, experts=1, local_experts=1, top_k=1)
    assert time.us == pytest.approx(average_us(rank, 1, of=alone))
    # On average, as six of the eight ranks have nothing to do.
    assert average_us(rank, 1) < time.us / 2


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=8), Parallel(tp=2, dp=4)], ids=str)
def test_without_expert_parallelism_no_rank_has_more_to_do_than_others(parallel: Parallel) -> None:
    problem = model_problem("gpt-oss-120b").on(parallel)
    times = predicted_times(problem, H200, TOKENS).times
    assert [time.us for time in times] == [average_us(problem, tokens) for tokens in TOKENS]


OSS, BF16, FP8 = (
    model_problem(*named) for named in (("gpt-oss-120b",), ("qwen3-30b", "bf16"), ("qwen3-30b", "fp8-block"))
)


@pytest.mark.parametrize("gpu", ["a100", "a10", "l40s", "b200", "rtx-pro-6000", "gh200"])
@pytest.mark.parametrize("problem", [OSS, BF16, FP8], ids=["mxfp4", "bf16", "fp8"])
def test_other_gpus_than_were_measured_have_times_without_an_error(problem: MoEProblem, gpu: str) -> None:
    device = find_device(gpu)
    found = predicted_times(problem, device, TOKENS)
    assert [time.tokens for time in found.times] == [*TOKENS]
    assert (found.median_error, found.reason) == (None, "")
    # No faster than memory lets it be, and no slower than twenty times that at a few tokens.
    share = min(1.0, problem.top_k / problem.experts)
    sizes = 3 * problem.dims.hidden * problem.dims.intermediate * problem.experts * share
    floor = 1e6 * sizes * problem.scheme.weight.bits / 8 / device.bandwidth
    assert floor < found.times[0].us < 20 * floor + 50


WITHOUT_A_SPECIAL_KERNEL = {
    "sizes of tiles": (replace(OSS, dims=Dims(2888, 2880)), {"decode", "grouped"}),
    "sizes": (replace(BF16, dims=Dims(2048, 760)), {"decode", "grouped"}),
    "tokens with one scale": (
        replace(FP8, scheme=Scheme(FP8.scheme.weight, FP8_ACT_TOKEN)),
        {"decode", "grouped"},
    ),
    "fp16 tokens with scales that exceed fp16": (replace(OSS, dtype="fp16"), {"stream", "grouped"}),
}


@pytest.mark.parametrize("name", WITHOUT_A_SPECIAL_KERNEL)
def test_portable_kernels_have_times_where_others_do_not_run(name: str) -> None:
    problem, families = WITHOUT_A_SPECIAL_KERNEL[name]
    found = predicted_times(problem, H200, (1, 4096))
    assert {time.family for time in found.times} == families
    assert found.median_error is not None


def test_decoded_weights_have_times_of_their_own() -> None:
    """FP8 with 16-bit tokens, which was measured on an H200 alone; tiles are among those for FP8 tokens."""
    problem = replace(FP8, scheme=Scheme(FP8.scheme.weight))
    found, quantized = (predicted_times(it, H200, (1, 64, 4096)) for it in (problem, FP8))
    assert {time.family for time in found.times} == {"tma"}
    assert found.median_error is not None and found.median_error != quantized.median_error
    assert found.times[-1].us > 1.2 * quantized.times[-1].us
    assert predicted_times(problem, find_device("h100"), (64,)).median_error is None


NO_TIMES = {
    "an old GPU": (OSS, find_device("t4"), "they are predicted for NVIDIA GPUs from SM80 on"),
    "AMD": (OSS, find_device("mi300x"), "they are predicted for NVIDIA GPUs from SM80 on"),
    "a GPU that nobody knows": (
        OSS,
        replace(H200, bandwidth=0.0),
        "the multiprocessors or the memory bandwidth of NVIDIA H200 are not known",
    ),
}


@pytest.mark.parametrize("name", NO_TIMES)
def test_where_there_are_no_times_there_is_a_reason(name: str) -> None:
    problem, device, reason = NO_TIMES[name]
    found = predicted_times(problem, device, (1, 64))
    assert (found.times, found.median_error, found.reason) == ((), None, reason)
    assert predicted_times(OSS, H200, (1, 64)).reason == ""
