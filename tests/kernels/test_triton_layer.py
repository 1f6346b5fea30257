"""What is derived from a layer's weights once: the range of its E8M0 scales."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels.prepared import PreparedMoE
from moectl.kernels.runners import Runner, runner_for
from moectl.kernels.triton.layer import layer_of
from moectl.kernels.triton.runner import aligned

from .layers import GPT_OSS, KIMI, canonical_roles
from .layers import layer_of as expert_layer


def test_the_range_of_e8m0_scales_leaves_padding_out() -> None:
    roles = canonical_roles(GPT_OSS)
    roles["w13_scale"].fill_(120)
    roles["w13_scale"][0, 0, 0], roles["w13_scale"][1, 5, 1] = 70, 190
    made = layer_of(expert_layer(GPT_OSS, roles).prepared("triton", "cpu"))
    assert made.w13.exponents == (70, 190)
    assert made.w13.exponents_within(range(64, 191)) and not made.w13.exponents_within(range(71, 191))


def test_scales_that_are_no_bytes_have_no_range() -> None:
    made = layer_of(expert_layer(KIMI, canonical_roles(KIMI)).prepared("triton", "cpu"))
    assert made.w13.exponents is None and not made.w13.exponents_within(range(256))


def test_a_layer_is_looked_at_once() -> None:
    prepared = expert_layer(GPT_OSS, canonical_roles(GPT_OSS)).prepared("triton", "cpu")
    assert layer_of(prepared) is layer_of(prepared)


def test_preparing_makes_a_layer_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a runner can run the layer; elsewhere it is for reading only."""
    seen: list[PreparedMoE] = []
    runner = runner_for("torch")
    ready = Runner("torch", None, runner.compute, runner.refusal, ready=seen.append)
    monkeypatch.setattr("moectl.experts.runner_for", lambda name: ready)
    prepared = expert_layer(GPT_OSS, canonical_roles(GPT_OSS)).prepared("torch", torch.device("cpu"))
    assert seen == [prepared]
    refusing = Runner("torch", None, runner.compute, lambda problem, device: "no", ready=seen.append)
    monkeypatch.setattr("moectl.experts.runner_for", lambda name: refusing)
    expert_layer(GPT_OSS, canonical_roles(GPT_OSS)).prepared("torch", torch.device("cpu"))
    assert len(seen) == 1


def test_tokens_are_copied_where_kernels_could_not_read_them() -> None:
    whole = torch.arange(200.0).bfloat16()
    odd, even = whole[1:129].view(2, 64), whole[:128].view(2, 64)
    assert aligned(even) is even
    made = aligned(odd)
    assert made.data_ptr() % 16 == 0 and torch.equal(made, odd)
    assert aligned(even.T).is_contiguous()
