"""Floors without torch: expected work under uniform routing, and published rates."""

import random
from dataclasses import replace

import pytest

from moectl.environment import Device, device_names, find_device
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel, expert_range
from moectl.problem.roofline import (
    DeviceRates,
    known_roofline,
    published_rates,
    roofline_time,
    uniform_work,
)
from moectl.problem.schemes import MXFP4, Scheme

PROBLEM = MoEProblem(Dims(256, 128), experts=8, top_k=2, scheme=Scheme(MXFP4))


def test_one_token_touches_top_k_experts_and_many_touch_all():
    one, many = uniform_work(PROBLEM, 1), uniform_work(PROBLEM, 10_000)
    assert one.experts == pytest.approx(2)
    assert one.weight_bytes == 2 * PROBLEM.expert_bytes()
    assert one.flops == 2 * 3 * 2 * 256 * 128
    assert many.experts == pytest.approx(8)
    assert many.flops == 10_000 * one.flops


def test_two_tokens_share_experts():
    # Each of 8 experts is missed by both tokens with probability (1 - 2/8)^2.
    assert uniform_work(PROBLEM, 2).experts == pytest.approx(8 * (1 - 0.75**2))


def test_tensor_parallel_ranks_share_the_work():
    whole, share = uniform_work(PROBLEM, 16), uniform_work(PROBLEM.on(Parallel(tp=4)), 16)
    assert share.flops * 4 == pytest.approx(whole.flops)
    assert share.weight_bytes * 4 == pytest.approx(whole.weight_bytes, abs=4)


def simulated(experts, top_k, ranks, tokens):
    """Mean number of active experts and of assignments on the rank that has the most."""
    draw, trials = random.Random(1), max(300, 5000 // tokens)
    bounds = [expert_range(experts, ranks, rank) for rank in range(ranks)]
    active, assigned = 0, 0
    for _ in range(trials):
        hits = [0] * experts
        for _ in range(tokens):
            for expert in draw.sample(range(experts), top_k):
                hits[expert] += 1
        active += max(sum(map(bool, hits[first:end])) for first, end in bounds)
        assigned += max(sum(hits[first:end]) for first, end in bounds)
    return active / trials, assigned / trials


@pytest.mark.parametrize("tokens", [1, 2, 8, 64])
@pytest.mark.parametrize(
    ("experts", "top_k", "ranks"),
    [(256, 8, 8), (128, 4, 8), (384, 8, 16), (32, 4, 2), (60, 4, 8), (128, 1, 4)],
)
def test_the_most_loaded_expert_parallel_rank_is_that_of_a_simulation(experts, top_k, ranks, tokens):
    problem = replace(PROBLEM, experts=experts, top_k=top_k, local_experts=0)
    work = uniform_work(problem.on(Parallel(tp=ranks, ep=True)), tokens)
    active, assigned = simulated(experts, top_k, ranks, tokens)
    assert work.experts == pytest.approx(active, rel=0.03)
    assert work.assignments == pytest.approx(assigned, rel=0.03)
    assert work.flops == pytest.approx(6 * 256 * 128 * work.assignments, abs=1)
    assert work.weight_bytes == pytest.approx(work.experts * problem.expert_bytes(), abs=1)


def test_one_token_on_as_many_ranks_as_experts_loads_one_expert():
    work = uniform_work(PROBLEM.on(Parallel(tp=8, ep=True)), 1)
    assert (work.experts, work.flops) == (1, 6 * 256 * 128)


def test_a_rank_gets_no_less_than_its_share_and_no_more_than_everything():
    for tokens in (1, 3, 17, 1000, 8192):
        problem = PROBLEM.on(Parallel(tp=3, ep=True))
        work, whole = uniform_work(problem, tokens), uniform_work(PROBLEM, tokens)
        assert whole.flops / 3 <= work.flops <= whole.flops
        assert whole.experts / 3 <= work.experts <= problem.local_experts


def test_ungated_experts_have_two_matrices():
    plain = replace(PROBLEM, activation=replace(PROBLEM.activation, gated=False))
    assert uniform_work(plain, 1).flops * 3 == uniform_work(PROBLEM, 1).flops * 2


@pytest.mark.parametrize(
    ("gpu", "act", "rate"),
    [
        ("h200", "a16", 989.5e12),
        ("h200", "fp8", 1979e12),
        ("h200", "mxfp8", 1979e12),
        ("h200", "nvfp4", 1979e12),
        ("a100", "fp8", 312e12),
        ("h20", "fp8", 296e12),
        ("gb10", "fp8", 0),
        ("h200", "int8", 0),
    ],
)
def test_the_fastest_unit_that_the_activations_allow(gpu, act, rate):
    assert published_rates(find_device(gpu), act).flops == rate


def test_an_unknown_rate_is_no_rate():
    work = uniform_work(PROBLEM, 4)
    assert known_roofline(work, DeviceRates(0, 1e12, "")) is None
    assert known_roofline(work, DeviceRates(1e12, 0, "")).bound == "memory"
    assert known_roofline(work, DeviceRates(1e12, 0, ""), needs_compute=True) is None
    assert known_roofline(work, DeviceRates(1e12, 1e15, "")) == roofline_time(
        work, DeviceRates(1e12, 1e15, "")
    )
    assert published_rates(Device("cuda", "sm90", "x"), "a16").bandwidth == 0


def test_narrower_formats_are_never_slower_where_both_rates_are_known():
    for name in device_names():
        device = find_device(name)
        rates = [r for r in (device.bf16_flops, device.fp8_flops, device.fp4_flops) if r]
        assert rates == sorted(rates), name
