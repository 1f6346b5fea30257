"""FlashInfer's CUTLASS kernels and emulation on a GPU, against the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from moectl.convert.layouts import cutlass
from moectl.convert.layouts.registry import Chain
from moectl.kernels.layer_inputs import LayerInputs, make_inputs
from moectl.kernels.modular.fused_moe_kernel import kernel_of
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.kernels.tolerance import check, tolerance_for
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import SWIGLU_OAI, Dims, MoEProblem, Routing
from moectl.problem.schemes import BF16, FP8_ACT_GROUP_128, FP8_BLOCK, MXFP4, NVFP4, NVFP4_ACT, Scheme
from support.absent_backends import skip_if_absent
from support.random_layers import skipping
from support.runners import apply

pytestmark = pytest.mark.gpu

GPT_OSS = MoEProblem(
    Dims(2880, 2880),
    experts=8,
    top_k=4,
    scheme=Scheme(MXFP4),
    activation=SWIGLU_OAI,
    routing=Routing(after_topk=True),
    rows="interleaved",
    bias=True,
)
PROBLEMS = {
    "gpt-oss": GPT_OSS,
    "small": replace(GPT_OSS, dims=Dims(512, 256), top_k=2),
    "bf16": replace(
        GPT_OSS, dims=Dims(512, 256), top_k=2, scheme=Scheme(BF16), bias=False, rows="concatenated"
    ),
    "fp8-block": MoEProblem(Dims(512, 256), experts=8, top_k=2, scheme=Scheme(FP8_BLOCK, FP8_ACT_GROUP_128)),
}


@cache
def layer_of(name: str) -> PreparedMoE:
    device, problem = torch.device("cuda"), PROBLEMS[name]
    skip_if_absent(problem, "flashinfer_cutlass")
    return RandomLayer(problem, device).experts.prepared("flashinfer_cutlass", device)


def inputs_of(problem: MoEProblem, tokens: int, distribution: str = "uniform") -> LayerInputs:
    return make_inputs(problem, tokens, seed=90001, distribution=distribution, device="cuda")


def assert_right(prepared: PreparedMoE, inputs: LayerInputs, y: Tensor) -> None:
    problem = prepared.problem
    expected = moe_reference(inputs.x, inputs.ids, inputs.weights, prepared.expert, problem)
    result = check(y, expected, tolerance_for(problem, runner_for(prepared.backend).accumulation_of(problem)))
    assert result.ok, result


@pytest.mark.parametrize("tokens", [1, 3, 16, 63, 257])
@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees_with_the_reference(name: str, tokens: int) -> None:
    prepared = layer_of(name)
    inputs = inputs_of(prepared.problem, tokens)
    assert_right(prepared, inputs, kernel_of(prepared).apply(inputs.x, inputs.ids, inputs.weights))


def test_weights_lie_as_flashinfer_lays_them_out() -> None:
    layer_of("small")  # skips where there is no FlashInfer
    from flashinfer.fused_moe import interleave_moe_weights_for_sm90_mixed_gemm as theirs

    weights = torch.randint(256, (3, 256, 128), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    mine = Chain(cutlass.WEIGHTS).apply(weights).view(torch.uint8)
    assert torch.equal(mine, theirs(weights.cuda()).cpu())


@pytest.mark.parametrize("name", ["gpt-oss", "small", "bf16"])
def test_its_tuner_finds_tactics(name: str) -> None:
    """That it can time them; FP8 blocks have none to choose from."""
    prepared = layer_of(name)
    from flashinfer.autotuner import AutoTuner

    AutoTuner.get().clear_cache()
    prepared.derived.pop("flashinfer_cutlass tactics", None)
    inputs = inputs_of(prepared.problem, 48)
    assert_right(prepared, inputs, kernel_of(prepared).apply(inputs.x, inputs.ids, inputs.weights))
    assert len(AutoTuner.get().profiling_cache) == 2, "one for each GEMM"
    assert_right(prepared, inputs, kernel_of(prepared).apply(inputs.x, inputs.ids, inputs.weights))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("distribution", ["hot:1:0.999", "zipf:3"])
def test_agrees_however_tokens_are_spread(name: str, distribution: str) -> None:
    prepared = layer_of(name)
    inputs = skipping(inputs_of(prepared.problem, 65, distribution), every=3)
    y = kernel_of(prepared).apply(inputs.x, inputs.ids, inputs.weights)
    assert_right(prepared, inputs, y)
    nobody = kernel_of(prepared).apply(inputs.x, torch.full_like(inputs.ids, -1), inputs.weights)
    assert not nobody.any()


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_captured_call_is_the_same_call(name: str) -> None:
    prepared = layer_of(name)
    kernel, inputs = kernel_of(prepared), inputs_of(prepared.problem, 16)
    kernel.apply(inputs.x, inputs.ids, inputs.weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.apply(inputs.x, inputs.ids, inputs.weights)
    other = inputs_of(prepared.problem, 16, "zipf:1")
    for mine, new in zip(
        (inputs.x, inputs.ids, inputs.weights), (other.x, other.ids, other.weights), strict=True
    ):
        mine.copy_(new)
    y.fill_(float("nan"))
    graph.replay()
    assert_right(prepared, other, y)


@pytest.mark.parametrize("scheme", [Scheme(MXFP4), Scheme(NVFP4, NVFP4_ACT)], ids=str)
def test_emulation_is_the_same_on_both_devices(scheme: Scheme) -> None:
    problem = replace(PROBLEMS["small"], scheme=scheme, bias=False)
    layer = RandomLayer(problem, torch.device("cpu")).experts
    here, there = (layer.prepared("emulation", device) for device in ("cpu", "cuda"))
    inputs = make_inputs(problem, 33, seed=90001)
    y = apply(runner_for("emulation"), here, inputs.x, inputs.ids, inputs.weights)
    moved = (t.cuda() for t in (inputs.x, inputs.ids, inputs.weights))
    torch.testing.assert_close(apply(runner_for("emulation"), there, *moved).cpu(), y, rtol=0.05, atol=0.02)
