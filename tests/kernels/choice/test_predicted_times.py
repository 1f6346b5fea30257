"""Predicted times of the launches that ship, without a GPU, torch or triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for

from moectl.environment import find_device
from moectl.kernels.choice.launch_model import coefficients
from moectl.kernels.choice.predicted_times import predicted_times
from moectl.kernels.triton.triton_runner import bandwidth_of, choose_shipped, predicted_for
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from moectl.problem.published_layers import SCHEMES, model_problem
from moectl.problem.schemes import FULL, ActFormat, Scheme, WeightFormat, act_format, int_format

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
    assert coefficients().format_for(family, weight) == measured
    assert predicted_times(problem, H200, (64,)).median_error is None


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
    "16-bit tokens": (replace(FP8, scheme=Scheme(FP8.scheme.weight)), {"decode", "grouped"}),
    "fp16 tokens with scales that exceed fp16": (replace(OSS, dtype="fp16"), {"stream", "grouped"}),
}


@pytest.mark.parametrize("name", WITHOUT_A_SPECIAL_KERNEL)
def test_portable_kernels_have_times_where_others_do_not_run(name: str) -> None:
    problem, families = WITHOUT_A_SPECIAL_KERNEL[name]
    found = predicted_times(problem, H200, (1, 4096))
    assert {time.family for time in found.times} == families
    # No launch of FP8 weights with 16-bit tokens was measured.
    assert (found.median_error is None) == (name == "16-bit tokens")


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
