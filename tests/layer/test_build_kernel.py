"""Kernels from decisions: what is chosen, and what does not fit is told before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from moectl.environment import Packages
from moectl.environment.named_devices import find_device
from moectl.errors import MoectlError, NoBackend, Unavailable, UsageError
from moectl.kernels.modular.exchange import SingleRankExchange
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.runner import ActivationFormat
from moectl.layer.build_kernel import build_kernel
from moectl.oracle.decision import Decision
from moectl.oracle.registry import policy_named
from moectl.oracle.select import OutOfScope, select
from moectl.problem.moe_problem import MoEProblem, Parallel, Routing
from support.fake_runners import MONOLITHIC, TORCH
from support.random_layers import GPT_OSS, KIMI, inputs_of, judged, random_layer
from support.rank_cases import decision_for
from support.runners import register_runner

ONE = Parallel()
SHARING = replace(KIMI, shared_experts=1)


def layer(problem: MoEProblem = KIMI) -> PreparedMoE:
    return random_layer(problem).prepared("torch", "cpu")


@pytest.mark.parametrize("problem", [KIMI, GPT_OSS])
@pytest.mark.parametrize("form", [None, ActivationFormat.BATCHED])
def test_builds_what_was_decided(problem: MoEProblem, form: ActivationFormat | None) -> None:
    whole = random_layer(problem)
    prepared = whole.prepared("torch", "cpu")
    kernel = build_kernel(decision_for(problem, ONE), prepared, form=form)
    assert kernel.prepared is prepared and kernel.runner.name == "torch"
    assert kernel.form is (form or ActivationFormat.STANDARD) and kernel.exchange == SingleRankExchange()
    assert kernel.expert_map is None
    inputs = inputs_of(problem, 6)
    assert judged(whole, prepared, kernel.run(inputs), inputs).ok


def test_monolithic_experts_are_built_and_refuse_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    register_runner(monkeypatch, MONOLITHIC, "torch")
    decision, prepared = decided_as(SHARING, monolithic=True), layer(SHARING)
    kernel = build_kernel(decision, prepared)
    assert kernel.monolithic
    with pytest.raises(NoBackend, match="is monolithic here, and takes no shared experts"):
        build_kernel(decision, prepared, shared=lambda x: x)


def decided_as(problem: MoEProblem, monolithic: bool = False, batched: bool = False) -> Decision:
    """A decision whose chosen experts are of another form."""
    decision = decision_for(problem, ONE)
    assert decision.chosen is not None
    variant = replace(decision.chosen.variant, monolithic=monolithic, batched=batched)
    return replace(decision, chosen=replace(decision.chosen, variant=variant))


def test_batched_experts_are_built_in_their_form() -> None:
    assert build_kernel(decided_as(KIMI, batched=True), layer()).form is ActivationFormat.BATCHED


def test_nothing_is_shared_between_layers() -> None:
    decision = decision_for(KIMI, ONE)
    one, other = build_kernel(decision, layer()), build_kernel(decision, layer())
    assert one.handle != other.handle and one.prepare_finalize is not other.prepare_finalize
    assert one.prepared.derived is not other.prepared.derived


def vllm(problem: MoEProblem, device: str) -> Decision:
    return select(problem, find_device(device), Packages({}), policy_named("vllm"))


def moectl(problem: MoEProblem, device: str) -> Decision:
    return select(problem, find_device(device), Packages({}), policy_named("moectl"))


REFUSED: dict[str, tuple[type[MoectlError], Callable[[], object]]] = {
    "moectl has no kernel for TPUs": (NoBackend, lambda: build_kernel(moectl(KIMI, "tpu"), layer())),
    "moectl has no kernel for platforms of engine plug-ins": (
        NoBackend,
        lambda: build_kernel(moectl(KIMI, "out-of-tree"), layer()),
    ),
    "policy vllm-0.33.0 chose .* experts, which this tool has no kernel for": (
        NoBackend,
        lambda: build_kernel(vllm(KIMI, "a100"), layer()),
    ),
    "the decision is for the moectl backend, the layer was prepared for torch": (
        UsageError,
        lambda: build_kernel(moectl(KIMI, "h200"), layer()),
    ),
    "another layer than the one prepared: top_k 4, not 2": (
        UsageError,
        lambda: build_kernel(decision_for(KIMI, ONE), layer(replace(KIMI, top_k=2))),
    ),
    "another layer than the one prepared: routing Routing": (
        UsageError,
        lambda: build_kernel(decision_for(KIMI, ONE), layer(replace(KIMI, routing=Routing()))),
    ),
    "the decision is for 2 ranks, the process group has 1": (
        UsageError,
        lambda: build_kernel(decision_for(KIMI, Parallel(dp=2, ep=True)), layer()),
    ),
    "rank 0 of 1 computes experts 0 to 8, the layer was prepared with 0 to 3": (
        UsageError,
        lambda: build_kernel(decision_for(KIMI, ONE), layer(replace(KIMI, local_experts=4))),
    ),
    "the layer has no shared experts, got some": (
        UsageError,
        lambda: build_kernel(decision_for(KIMI, ONE), layer(), shared=lambda x: x),
    ),
    "memory is for a number of tokens, got none": (
        UsageError,
        lambda: build_kernel(decision_for(KIMI, ONE), layer(), memory=1 << 20),
    ),
    "does not say how much memory a call takes": (
        NoBackend,
        lambda: build_kernel(decision_for(KIMI, ONE), layer(), memory=1 << 20, most_tokens=8),
    ),
}


def test_a_shared_expert_that_is_refused_is_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = layer()
    monkeypatch.setattr(
        "moectl.layer.build_kernel.dense_shared", lambda expert, prepared: pytest.fail("it was cast")
    )
    with pytest.raises(UsageError, match="the layer has no shared experts, got some"):
        build_kernel(decision_for(KIMI, ONE), prepared, shared=prepared.expert(0))


@pytest.mark.parametrize("says", REFUSED)
def test_what_does_not_fit_is_told_when_a_kernel_is_built(says: str) -> None:
    kind, call = REFUSED[says]
    with pytest.raises(kind, match=says):
        call()


def test_vllm_s_rules_say_nothing_for_some_platforms() -> None:
    with pytest.raises(OutOfScope, match="plug-in has its own"):
        vllm(GPT_OSS, "tpu")


def test_memory_is_held_to_what_the_parts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    saying = replace(TORCH, workspace=lambda prepared, tokens, form: tokens << 20)
    register_runner(monkeypatch, saying)
    build = partial(build_kernel, decision_for(KIMI, ONE), layer(), most_tokens=8)
    kernel = build(memory=9 << 20)
    need = kernel.workspace(8)
    assert need is not None and 8 << 20 <= need < 9 << 20
    batched = FusedMoEKernel(kernel.prepared, kernel.runner, ActivationFormat.BATCHED).workspace(8)
    assert batched is not None and batched > need
    with pytest.raises(Unavailable, match=f"a call of 8 tokens .* takes up to {need} bytes, allowed are"):
        build(memory=need - 1)


def test_a_dense_shared_expert_is_an_expert_of_the_layer_s_kind() -> None:
    whole = random_layer(SHARING)
    prepared = whole.prepared("torch", "cpu")
    inputs = inputs_of(SHARING, 5)
    kernel = build_kernel(
        decision_for(SHARING, ONE), prepared, shared=whole.reference(2), dtype=torch.float32
    )
    plain = build_kernel(decision_for(SHARING, ONE), prepared, dtype=torch.float32)
    only = replace(inputs, ids=torch.full_like(inputs.ids, -1), weights=torch.ones_like(inputs.weights))
    only.ids[:, 0] = 2
    alone = plain.run(only)
    assert torch.allclose(kernel.run(inputs), plain.run(inputs) + alone, rtol=1e-2, atol=1e-2)
