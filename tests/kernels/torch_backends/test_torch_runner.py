"""The torch backend against the reference, on both families, odd sizes and odd routings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.errors import NoBackend, UsageError
from moectl.kernels.prepared_layer import DenseExperts, PreparedMoE
from moectl.kernels.registry import RUNNERS, runner_for
from moectl.kernels.torch_backends import decoding
from moectl.kernels.torch_backends.torch_runner import operand_dtype
from moectl.problem.moe_problem import Activation, Dims, MoEProblem
from support.random_layers import FAMILIES, GPT_OSS, KIMI, inputs_of, judged, random_layer, skipping
from support.runners import apply

PROBLEMS = {
    **FAMILIES,
    "gpt-oss, hidden 96, intermediate 32": replace(GPT_OSS, dims=Dims(96, 32)),
    "kimi, hidden 32, intermediate 96": replace(KIMI, dims=Dims(32, 96)),
    "one expert": replace(KIMI, experts=1, local_experts=1, top_k=1),
    "all experts": replace(KIMI, top_k=9),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 20])
def test_agrees_with_the_reference(name: str, tokens: int) -> None:
    problem = PROBLEMS[name]
    layer = random_layer(problem)
    prepared = layer.prepared("torch", "cpu")
    inputs = inputs_of(problem, tokens)
    y = apply(runner_for("torch"), prepared, inputs.x, inputs.ids, inputs.weights)
    assert y.dtype == inputs.x.dtype and y.shape == inputs.x.shape
    result = judged(layer, prepared, y, inputs)
    assert result.ok, result


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("distribution", ["hot:1:0.999", "zipf:2", "balanced"])
def test_agrees_however_tokens_are_spread(family: str, distribution: str) -> None:
    problem = replace(FAMILIES[family], top_k=1)
    layer = random_layer(problem)
    prepared = layer.prepared("torch", "cpu")
    inputs = inputs_of(problem, 33, distribution=distribution)
    y = apply(runner_for("torch"), prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_skipped_assignments_and_weights_on_either_side(weight_on_input: bool) -> None:
    routing = replace(KIMI.routing, weight_on_input=weight_on_input)
    problem = replace(KIMI, routing=routing)
    layer = random_layer(problem)
    prepared = layer.prepared("torch", "cpu")
    inputs = skipping(inputs_of(problem, 12), every=3)
    y = apply(runner_for("torch"), prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok
    assert not y[0].any()


def test_decodes_only_experts_that_are_hit_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(KIMI)
    whole = layer.prepared("torch", "cpu")
    asked: list[list[int]] = []

    def dense(ids: object) -> DenseExperts:
        asked.append(list(ids))  # type: ignore[call-overload]
        return whole.dense(ids)  # type: ignore[arg-type]

    expert = 3 * KIMI.dims.hidden * KIMI.dims.intermediate * 4
    monkeypatch.setattr(decoding, "DECODE_BYTES", 2 * expert + 1)
    prepared = PreparedMoE(KIMI, "torch", whole.layout, whole.weights, dense)
    inputs = inputs_of(KIMI, 2)
    ids = torch.tensor([[8, 1, 4, 5], [1, 8, 0, -1]], dtype=torch.int32)
    apply(runner_for("torch"), prepared, inputs.x, ids, inputs.weights)
    assert asked == [[0, 1], [4, 5], [8]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp16_layers_keep_the_bits_of_fp16(device: str) -> None:
    """Only the result is rounded, to 11 bits: 2.0e-4 RMS. Operands in bf16 would cost ten times as much."""
    problem = replace(KIMI, dtype="fp16")
    layer = random_layer(problem)
    prepared = layer.prepared("torch", device)
    inputs = inputs_of(problem, 20)
    moved = (t.to(device) for t in (inputs.x, inputs.ids, inputs.weights))
    y = apply(runner_for("torch"), prepared, *moved)
    assert judged(layer, prepared, y.cpu(), inputs).rms < 3e-4
    assert operand_dtype(torch.device(device), problem) == torch.float32


def test_repeats_bit_for_bit() -> None:
    layer = random_layer(GPT_OSS)
    prepared = layer.prepared("torch", "cpu")
    inputs = inputs_of(GPT_OSS, 40)
    first, second = (
        apply(runner_for("torch"), prepared, inputs.x, inputs.ids, inputs.weights) for _ in range(2)
    )
    assert torch.equal(first, second)


def broken(problem: MoEProblem, change: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = inputs_of(problem, 2)
    x, ids, weights = inputs.x, inputs.ids, inputs.weights
    changes = {
        "ids must be torch.int32, got torch.int64": (x, ids.long(), weights),
        "weights must be torch.float32": (x, ids, weights.bfloat16()),
        "x must be .tokens, 192.": (x[:, 1:], ids, weights),
        r"ids must be \[2, 4\], got \[2, 3\]": (x, ids[:, 1:], weights),
        "x must be torch.bfloat16 or": (x.float(), ids, weights),
        "ids must be below 9, the experts here; got 9": (x, ids.clone().fill_(9), weights),
    }
    assert change in changes
    return changes[change]


@pytest.mark.parametrize(
    "message",
    [
        "ids must be torch.int32, got torch.int64",
        "weights must be torch.float32",
        "x must be .tokens, 192.",
        r"ids must be \[2, 4\], got \[2, 3\]",
        "x must be torch.bfloat16 or",
        "ids must be below 9, the experts here; got 9",
    ],
)
def test_refuses_arguments_that_do_not_fit(message: str) -> None:
    prepared = random_layer(KIMI).prepared("torch", "cpu")
    with pytest.raises(UsageError, match=message):
        apply(runner_for("torch"), prepared, *broken(KIMI, message))


def test_refuses_activations_and_layouts_that_it_does_not_have() -> None:
    prepared = random_layer(KIMI).prepared("torch", "cpu")
    inputs = inputs_of(KIMI, 1)
    odd = replace(prepared, problem=replace(KIMI, activation=Activation("relu2")))
    with pytest.raises(NoBackend, match="activation relu2"):
        apply(runner_for("torch"), odd, inputs.x, inputs.ids, inputs.weights)
    with pytest.raises(NoBackend, match="reads layout moectl-mtile64, got weights in canonical"):
        apply(runner_for("moectl"), prepared, inputs.x, inputs.ids, inputs.weights)


def test_runners_are_found_by_name() -> None:
    assert all(runner_for(name).name == name for name in RUNNERS)
    with pytest.raises(UsageError, match=f"'cublas'.*{', '.join(RUNNERS)}"):
        runner_for("cublas")
