"""The sonic_moe backend against a stand-in that computes what SonicMoE documents, in torch on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moectl.environment import Packages, find_device
from moectl.errors import Unavailable
from moectl.kernels.external import sonic_moe
from moectl.kernels.registry import runner_for
from moectl.oracle import policy_named, select
from support import peer_cases as cases
from support.random_layers import inputs_of


class ActivationType(Enum):
    SWIGLU = "swiglu"


def stand_in(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    E: int,
    stream_id: int,
    activation_type: ActivationType,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sums of experts' outputs times scores; checks what SonicMoE requires of its arguments."""
    assert b1 is None and b2 is None and concat_layout and is_inference_mode_enabled
    assert activation_type is ActivationType.SWIGLU
    inter, hidden = w2.shape[1], w2.shape[0]
    assert w1.shape == (2 * inter, hidden, E) and w2.shape == (hidden, inter, E)
    # Experts are outermost in memory, columns innermost: stride order (2, 0, 1).
    assert w1.stride() == (hidden, 1, 2 * inter * hidden) and w2.stride() == (inter, 1, hidden * inter)
    assert bool((token_indices.diff() >= 0).all()) and router_scores.dtype == torch.float32
    assert token_indices.dtype == expert_indices.dtype == torch.int32
    assert len(token_indices) == len(expert_indices) == len(router_scores)
    assert int(expert_indices.min()) >= 0 and int(expert_indices.max()) < E
    out = torch.zeros(len(x), hidden)
    for score, token, expert in zip(
        router_scores, token_indices.tolist(), expert_indices.tolist(), strict=True
    ):
        gate, up = (w1[:, :, expert].float() @ x[token].float()).chunk(2)
        h = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
        out[token] += score * (w2[:, :, expert].float() @ h).to(x.dtype).float()
    return out.to(x.dtype), torch.bincount(expert_indices, minlength=E)


@pytest.fixture
def sonic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in in place of the package, and a CPU that counts as a GPU."""
    monkeypatch.setattr(sonic_moe, "library", lambda: SimpleNamespace(moe_general_routing_inputs=stand_in))
    monkeypatch.setattr(sonic_moe, "device_refusal", lambda device, support: "")
    monkeypatch.setattr(sonic_moe, "module", lambda name: SimpleNamespace(ActivationType=ActivationType))
    yield


@pytest.mark.parametrize("kind", cases.KINDS)
def test_agrees_with_the_reference(kind: str, sonic: None) -> None:
    layer = cases.layer_for(cases.GROUPED["bf16"])
    prepared = layer.prepared("sonic_moe", "cpu")
    assert prepared.layout == "plain-bf16"
    for tokens in (1, 9):
        cases.run_agrees(runner_for("sonic_moe"), layer, prepared, tokens, kind)


def test_tokens_without_an_expert_are_zero_whatever_they_hold(sonic: None) -> None:
    problem = cases.GROUPED["bf16"]
    prepared = cases.layer_for(problem).prepared("sonic_moe", "cpu")
    inputs = inputs_of(problem, 4)
    x, ids = inputs.x.clone(), inputs.ids.clone()
    x[1], ids[1], ids[2, 0] = float("nan"), -1, problem.experts + 3
    y = sonic_moe.compute(prepared, x, ids, inputs.weights)
    assert not y[1].any() and bool(torch.isfinite(y).all())
    assert sonic_moe.compute(prepared, x[:0], ids[:0], inputs.weights[:0]).shape == x[:0].shape


def test_a_version_that_takes_other_layouts_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(x: Tensor, is_concatenated_gate_up: bool = False) -> None: ...

    sonic_moe.library.cache_clear()
    for found in (SimpleNamespace(moe_general_routing_inputs=older), SimpleNamespace()):
        monkeypatch.setattr(sonic_moe, "package", lambda name, found=found: found)
        with pytest.raises(Unavailable, match=r"lacks moe_general_routing_inputs\(\.\.\., concat_layout"):
            sonic_moe.library()


def test_it_is_chosen_on_request_where_its_package_is() -> None:
    problem = cases.GROUPED["bf16"]
    packages = Packages({"sonicmoe": "0.1.2"})
    for device, there, runs in (
        ("h200", packages, True),
        ("h200", Packages(), False),
        ("a100", packages, False),
    ):
        given = (problem, find_device(device), there, policy_named("moectl"))
        assert (select(*given, "sonic_moe").chosen is not None) == runs
