"""torch's grouped products on a CPU, where BF16 layers are computed without kernels of moectl's own."""

from __future__ import annotations

import pytest
import torch

from moectl.environment import Packages, find_device
from moectl.errors import NoBackend, UsageError
from moectl.kernels.external import torch_grouped
from moectl.kernels.external.import_library import unavailable_reason
from moectl.kernels.registry import runner_for
from moectl.oracle import policy_named, select
from support import peer_cases as cases
from support.random_layers import inputs_of
from support.runners import apply

PLAIN = [name for name in cases.GROUPED if name.startswith("bf16")]
FP8 = cases.GROUPED["fp8 channel, fp8 tokens"]


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("name", PLAIN)
def test_agrees_with_the_reference(name: str, kind: str) -> None:
    problem = cases.GROUPED[name]
    layer = cases.layer_for(problem)
    prepared = layer.prepared("torch_grouped", "cpu")
    assert prepared.layout == "plain-bf16"
    for tokens in (1, 17):
        cases.run_agrees(runner_for("torch_grouped"), layer, prepared, tokens, kind)


def test_no_tokens_and_other_dtypes() -> None:
    problem = cases.GROUPED["bf16"]
    prepared = cases.layer_for(problem).prepared("torch_grouped", "cpu")
    inputs, runner = inputs_of(problem, 3), runner_for("torch_grouped")
    assert (
        apply(runner, prepared, inputs.x[:0], inputs.ids[:0], inputs.weights[:0]).shape == inputs.x[:0].shape
    )
    with pytest.raises(UsageError, match="the model's dtype"):
        apply(runner, prepared, inputs.x.half(), inputs.ids, inputs.weights)


def test_fp8_weights_are_refused_on_a_cpu() -> None:
    assert not torch_grouped.problem_refusal(FP8)
    says = "on a CPU torch multiplies 16-bit rows only; the layer has fp8 tokens"
    assert torch_grouped.refusal(FP8, torch.device("cpu")) == says
    prepared = cases.layer_for(FP8).prepared("torch_grouped", "cpu")
    inputs = inputs_of(FP8, 3)
    with pytest.raises(NoBackend, match=says):
        apply(runner_for("torch_grouped"), prepared, inputs.x, inputs.ids, inputs.weights)


def test_scales_and_weights_are_as_the_product_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = cases.layer_for(FP8).prepared("torch_grouped", "cpu")
    w13, w2 = torch_grouped.ready(prepared)
    experts, (hidden, inter) = FP8.experts, (FP8.dims.hidden, FP8.dims.intermediate)
    assert w13.weight.shape == (experts, hidden, 2 * inter) and w13.weight.dtype == torch.float8_e4m3fn
    assert w13.weight.stride(1) == 1  # columns of the transposed matrix lie together
    assert w13.scales is not None and w13.scales.shape == (experts, 2 * inter)
    assert w2.scales is not None and w2.scales.dtype == torch.float32
    dense = prepared.expert(1)
    assert torch.equal(w2.weight[1].float().T * w2.scales[1][:, None], dense.w2.float())
    called = {}

    def scaled(
        x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **given: object
    ) -> None:
        called.update(given, shapes=(x.shape, weight.shape, a.shape, b.shape))

    monkeypatch.setattr(torch_grouped, "products", lambda: (None, scaled))
    ends = torch.zeros(experts, dtype=torch.int32)
    x, scales = torch.zeros(12, hidden).to(torch.float8_e4m3fn), torch.ones(1, 1, 12)
    torch_grouped.product(w13, x, scales, ends, torch.bfloat16)
    assert called.pop("offs") is ends
    assert called == {
        "shapes": ((12, hidden), (experts, hidden, 2 * inter), (12,), (experts, 2 * inter)),
        "out_dtype": torch.bfloat16,
        "use_fast_accum": True,
    }


def test_a_torch_without_the_product_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_grouped, "PRODUCTS", ("_grouped_mm", "_scaled_grouped_mm_of_tomorrow"))
    torch_grouped.products.cache_clear()
    reason = unavailable_reason(torch_grouped.products)
    torch_grouped.products.cache_clear()
    assert reason.startswith(f"torch {torch.__version__} lacks torch._scaled_grouped_mm_of_tomorrow")


@pytest.mark.parametrize(
    ("device", "plain", "fp8"), [("h200", True, True), ("cpu", True, False), ("a100", False, False)]
)
def test_it_needs_no_package(device: str, plain: bool, fp8: bool) -> None:
    for problem, runs in ((cases.GROUPED["bf16"], plain), (FP8, fp8)):
        given = (problem, find_device(device), Packages(), policy_named("moectl"))
        assert (select(*given, "torch_grouped").chosen is not None) == runs
        ranked = [it.backend.name for it in select(*given).candidates]
        assert (ranked.index("torch_grouped") < ranked.index("torch")) == (device != "cpu")
