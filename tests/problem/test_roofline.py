"""Floors without torch: expected work under uniform routing, and published rates."""

from dataclasses import replace

import pytest

from moectl.environment import Device, device_names, find_device
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
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


@pytest.mark.parametrize("parallel", [Parallel(tp=4), Parallel(tp=4, ep=True)])
def test_ranks_share_the_work(parallel):
    whole, share = uniform_work(PROBLEM, 16), uniform_work(PROBLEM.on(parallel), 16)
    assert share.flops * 4 == pytest.approx(whole.flops)
    assert share.weight_bytes * 4 == pytest.approx(whole.weight_bytes, abs=4)


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
        ("h20", "fp8", 0),
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
