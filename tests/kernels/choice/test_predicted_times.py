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
from moectl.problem.schemes import Scheme

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


OSS, BF16, FP8 = (
    model_problem(*named) for named in (("gpt-oss-120b",), ("qwen3-30b", "bf16"), ("qwen3-30b", "fp8-block"))
)
PORTABLE = "portable kernels run this layer, whose times are not predicted"
NO_TIMES = {
    "another GPU": (OSS, find_device("a100"), "they are predicted on SM90 only"),
    "a newer one": (OSS, find_device("b200"), "they are predicted on SM90 only"),
    "AMD": (OSS, find_device("mi300x"), "they are predicted on SM90 only"),
    "a GPU that nobody knows": (
        OSS,
        replace(H200, bandwidth=0.0),
        "the multiprocessors or the memory bandwidth of NVIDIA H200 are not known",
    ),
    "sizes of tiles": (
        replace(OSS, dims=Dims(2888, 2880)),
        H200,
        f"{PORTABLE} (stream: it needs sizes that are multiples of 16; the layer's hidden size is 2888)",
    ),
    "sizes": (
        replace(BF16, dims=Dims(2048, 760)),
        H200,
        f"{PORTABLE} (tma: it needs sizes that are multiples of 16; the layer's intermediate size is 760)",
    ),
    "16-bit tokens": (
        replace(FP8, scheme=Scheme(FP8.scheme.weight)),
        H200,
        f"{PORTABLE} (tma: it multiplies fp8 block 128x128 weights with FP8 tokens only; "
        "the layer has 16-bit ones)",
    ),
}


@pytest.mark.parametrize("name", NO_TIMES)
def test_where_there_are_no_times_there_is_a_reason(name: str) -> None:
    problem, device, reason = NO_TIMES[name]
    found = predicted_times(problem, device, (1, 64))
    assert (found.times, found.median_error, found.reason) == ((), None, reason)
    assert predicted_times(OSS, H200, (1, 64)).reason == ""


def test_times_end_where_portable_kernels_run() -> None:
    problem, unknown = replace(OSS, dtype="fp16"), "tokens, whose times are not predicted"
    some, none = (predicted_times(problem, H200, tokens) for tokens in ((1, 64, 4096), (4096,)))
    assert [(time.tokens, time.family) for time in some.times] == [(1, "stream"), (64, "stream")]
    assert some.reason == f"portable kernels run more {unknown}"
    assert (none.times, none.reason) == ((), f"portable kernels run so many {unknown}")
