"""Inputs, floors and times."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from moectl.errors import UsageError
from moectl.kernels.layer_inputs import make_inputs, work_of
from moectl.kernels.reference import route
from moectl.kernels.routing_distributions import check_distribution
from moectl.kernels.timing.cold_calls import measured_rates, time_calls
from moectl.problem.moe_problem import Dims
from moectl.problem.roofline import DeviceRates, roofline_time
from support.random_layers import GPT_OSS, KIMI

CPU = torch.device("cpu")
MANY = replace(KIMI, experts=64, local_experts=64, top_k=4)


@pytest.mark.parametrize("problem", [GPT_OSS, KIMI])
@pytest.mark.parametrize("distribution", ["uniform", "balanced", "zipf:1.2", "hot:2:0.9", "experts:5"])
def test_inputs_follow_from_their_logits_and_seed(problem: object, distribution: str) -> None:
    first, again = (make_inputs(problem, 7, 3, distribution) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(first.x, again.x) and torch.equal(first.ids, again.ids)
    assert not torch.equal(first.x, make_inputs(problem, 7, 4, distribution).x)  # type: ignore[arg-type]
    bias = torch.zeros(problem.experts) if problem.routing.correction_bias else None  # type: ignore[attr-defined]
    ids, weights = route(first.logits, problem, bias)  # type: ignore[arg-type]
    assert torch.equal(ids, first.ids) and torch.equal(weights, first.weights)
    assert all(len(set(row)) == 4 for row in first.ids.tolist())


def test_distributions_are_what_they_say() -> None:
    def counts(distribution: str) -> torch.Tensor:
        ids = make_inputs(MANY, 512, 0, distribution).ids
        return torch.bincount(ids.flatten(), minlength=64).sort(descending=True).values

    assert counts("balanced").unique().tolist() == [32]
    assert counts("uniform")[0] < 64
    assert counts("zipf:1.2")[0] > 4 * counts("zipf:1.2")[20]
    assert counts("hot:4:0.9")[:4].sum() > 1000
    assert (counts("experts:6") > 0).sum() == 6
    assert counts("experts:1").tolist()[:5] == [512] * 4 + [0]


@pytest.mark.parametrize(
    ("distribution", "words"),
    [
        ("", "is not known"),
        ("normal", "is not known"),
        ("zipf", "has 0 arguments, expected 1"),
        ("balanced:1", "has 1 arguments, expected 0"),
        ("hot:4", "has 1 arguments, expected 2"),
        ("zipf:x", "A must be a number from 0 to 100, got 'x'"),
        ("zipf:nan", "A must be"),
        ("zipf:inf", "A must be"),
        ("zipf:1e308", "A must be"),
        ("hot:0:0.5", "N must be a whole number"),
        ("experts:0", "N must be a whole number"),
        ("hot:1.5:0.5", "N must be"),
        ("hot:inf:0.5", "N must be"),
        ("hot:2:1.5", "F must be a fraction between 0 and 1, got '1.5'"),
        ("hot:1:nan", "F must be"),
    ],
)
def test_other_distributions_are_refused_with_the_part_that_is_wrong(distribution: str, words: str) -> None:
    for refuse in (check_distribution, lambda text: make_inputs(MANY, 1, 0, text)):
        with pytest.raises(UsageError, match=f"^routing distribution .*{words}"):
            refuse(distribution)


def test_inputs_need_fewer_hot_experts_than_there_are_and_no_negative_tokens() -> None:
    check_distribution("hot:64:0.5")
    with pytest.raises(UsageError, match="must leave one of 64 experts out, got N = 64"):
        make_inputs(MANY, 1, 0, "hot:64:0.5")
    with pytest.raises(UsageError, match="must not be negative, got -1"):
        make_inputs(MANY, -1)


def test_distributions_are_checked_without_torch() -> None:
    code = (
        "import sys; from moectl.kernels.routing_distributions import check_distribution; "
        "check_distribution('zipf:1.2'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_work_counts_each_hit_expert_once() -> None:
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]], dtype=torch.int32)
    problem = replace(GPT_OSS, dims=Dims(64, 32))
    work = work_of(problem, ids)
    # Per expert: 3 matrices of 64 x 32 codes at half a byte, a scale byte per 32, and 2-byte biases.
    expert = 3 * 64 * 32 // 2 + 3 * 64 * 32 // 32 + 2 * (64 + 64)
    assert (work.experts, work.weight_bytes) == (4, 4 * expert)
    assert work.flops == 6 * (3 * 2 * 64 * 32)
    assert work.activation_bytes == 2 * 2 * 64 * 2
    assert work_of(problem, torch.full((1, 4), -1)).bytes == 2 * 64 * 2


def test_the_roofline_is_the_larger_of_the_two_times() -> None:
    work = work_of(GPT_OSS, torch.tensor([[0, 1, 2, 3]]))
    slow_memory = roofline_time(work, DeviceRates(1e3, 1e30, "test"))
    slow_math = roofline_time(work, DeviceRates(1e30, 1e3, "test"))
    assert slow_memory.bound == "memory" and slow_memory.seconds == work.bytes / 1e3
    assert slow_math.bound == "compute" and slow_math.seconds == work.flops / 1e3


def test_times_are_taken_in_turn_and_summed_up() -> None:
    made: list[int] = []
    calls = [lambda i=i: made.append(i) for i in range(3)]  # type: ignore[misc]
    timing = time_calls(calls, CPU, repeats=7, cold=False)
    assert made == [0, 0, 1, 2, 0, 1, 2, 0]
    assert timing.samples == 7 and 0 < timing.fastest_us <= timing.median_us and timing.spread_us >= 0
    assert time_calls(calls, CPU, repeats=1).cold
    with pytest.raises(UsageError, match="got 0 and 5"):
        time_calls([], CPU, repeats=5)


def test_measured_rates_are_those_of_a_computer() -> None:
    rates = measured_rates(CPU)
    assert 1e8 < rates.bandwidth < 1e14 and 1e8 < rates.flops < 1e16
