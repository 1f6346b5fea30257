"""A layer's kernel on a GPU: CUDA graphs, no allocation after warm-up, streams, threads, stated memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from moectl.kernels.layer_inputs import LayerInputs
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel, map_of
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.quantize_tokens import QuantizedTokens, dequantize, quantize
from moectl.kernels.reference import route
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import ActivationFormat, Runner
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import MXFP8_ACT, NVFP4_ACT, ActFormat
from support.random_layers import GPT_OSS, KIMI, canonical_roles, inputs_of, judged, layer_of

from ..test_quantize_tokens import BY_BLOCK, BY_TOKEN, tokens
from ..triton.test_gpu_stability import poison_cached_memory, same_bits

pytestmark = pytest.mark.gpu

LAYERS: dict[str, MoEProblem] = {
    "gpt-oss": replace(GPT_OSS, dims=Dims(2880, 1440), experts=8, local_experts=8, model_hidden=2880),
    "kimi": replace(KIMI, dims=Dims(2048, 1024), experts=16, local_experts=16, model_hidden=2048),
}
TOKENS = (1, 48, 300)
"""Few numbers, as every one of a layer is kernels to compile."""


@lru_cache(maxsize=3)
def layer(name: str, backend: str = "moectl") -> PreparedMoE:
    roles = {role: t.cuda() for role, t in canonical_roles(LAYERS[name]).items()}
    return layer_of(LAYERS[name], roles).prepared(backend, "cuda")


def part_of(name: str) -> PreparedMoE:
    """The second half of a layer's experts."""
    problem = LAYERS[name]
    half = problem.experts // 2
    roles = {role: t[half:].cuda() for role, t in canonical_roles(problem).items()}
    part = layer_of(replace(problem, local_experts=problem.experts - half), roles)
    return replace(part.prepared("moectl", "cuda"), first_expert=half)


TRITON = runner_for("moectl")


def wanting(form: ActFormat) -> Runner:
    """moectl's kernels behind tokens that came quantized."""

    def compute(prepared: PreparedMoE, x: QuantizedTokens, ids: Tensor, weights: Tensor) -> Tensor:
        assert TRITON.compute is not None
        return TRITON.compute(prepared, dequantize(x).bfloat16(), ids, weights)

    return replace(TRITON, name=f"triton wanting {form.name}", compute=compute, wants=form)


KERNELS: dict[str, Callable[[str], FusedMoEKernel]] = {
    "standard": lambda name: FusedMoEKernel(layer(name), TRITON),
    "shared experts in fp32": lambda name: FusedMoEKernel(
        layer(name), TRITON, shared=lambda x: x.float() * 2, dtype=torch.float32
    ),
    "half of the experts": lambda name: FusedMoEKernel(
        part_of(name), TRITON, expert_map=map_of(part_of(name))
    ),
    "batched": lambda name: FusedMoEKernel(layer(name), TRITON, ActivationFormat.BATCHED),
    "mxfp8 tokens": lambda name: FusedMoEKernel(layer(name), wanting(MXFP8_ACT)),
}


def called(kernel: FusedMoEKernel, tokens: int) -> tuple[LayerInputs, Callable[[], Tensor]]:
    inputs = inputs_of(kernel.prepared.problem, tokens, device="cuda")
    return inputs, lambda: kernel.run(inputs)


def words(t: Tensor) -> Tensor:
    return t.view(torch.int16)


def every_kind() -> list[tuple[str, str]]:
    """Each kind of kernel of one layer, and the first of each layer."""
    return [("kimi", kind) for kind in KERNELS] + [(name, "standard") for name in LAYERS if name != "kimi"]


@pytest.mark.parametrize(("name", "kind"), every_kind())
def test_a_captured_call_gives_what_the_call_gives_for_new_inputs(name: str, kind: str) -> None:
    kernel = KERNELS[kind](name)
    assert kernel.capturable
    for count in TOKENS:
        inputs, call = called(kernel, count)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        other = inputs_of(kernel.prepared.problem, count, device="cuda", distribution="zipf:1.2")
        for place, new in ((inputs.x, other.x), (inputs.ids, other.ids), (inputs.weights, other.weights)):
            place.copy_(new)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = kernel.run(other)
        assert torch.isfinite(y).all() and torch.equal(words(y), words(expected)), count


@pytest.mark.parametrize("kind", KERNELS)
def test_nothing_is_allocated_after_warming_up(kind: str) -> None:
    kernel = KERNELS[kind]("kimi")
    for count in TOKENS:
        _, call = called(kernel, count)
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        for key in ("num_device_alloc", "segment.all.allocated", "num_alloc_retries"):
            assert after[key] == before[key], (kind, count, key)


@pytest.mark.parametrize("kind", KERNELS)
def test_agrees_with_the_reference(kind: str) -> None:
    kernel = KERNELS[kind]("kimi")
    problem = LAYERS["kimi"]
    whole = layer_of(problem, {role: t.cuda() for role, t in canonical_roles(problem).items()})
    for count in TOKENS:
        inputs, call = called(kernel, count)
        poison_cached_memory(-1)
        y = call()
        seen = inputs
        if kind == "mxfp8 tokens":
            seen = replace(inputs, x=dequantize(quantize(inputs.x, MXFP8_ACT)).bfloat16())
        if kind == "half of the experts":
            seen = replace(inputs, ids=torch.where(inputs.ids >= problem.experts // 2, inputs.ids, -1))
        if kind == "shared experts in fp32":
            y = (y - inputs.x.float() * 2).bfloat16()
        result = judged(whole, kernel.prepared, y, seen)
        print(kind, count, f"max {result.max:.2e} rms {result.rms:.2e}")
        assert result.ok, (kind, count, result)


@pytest.mark.parametrize("kind", KERNELS)
def test_streams_and_threads_at_once(kind: str) -> None:
    others = KERNELS["standard"]("gpt-oss")
    calls = [called(kernel, 48)[1] for kernel in (KERNELS[kind]("kimi"), others)]
    expected = [call() for call in calls]
    torch.cuda.synchronize()

    def several(i: int) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [calls[i % 2]() for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for i, found in enumerate(pool.map(several, range(4))):
            assert all(torch.equal(words(y), words(expected[i % 2])) for y in found), (kind, i)


EXTRA = {
    "standard": 0,
    "half of the experts": 0,
    "batched": 0,
    "shared experts in fp32": 4,
    "mxfp8 tokens": 6,
}
"""Sizes of a result that shared experts, or a test's own decoding, may take beside what is said."""


@pytest.mark.parametrize(("name", "kind"), every_kind())
def test_a_call_takes_no_more_memory_than_is_said(name: str, kind: str) -> None:
    holds(KERNELS[kind](name), kind)


@pytest.mark.parametrize("form", [ActivationFormat.STANDARD, ActivationFormat.BATCHED])
def test_marlin_s_layout_takes_no_more_memory_than_is_said(form: ActivationFormat) -> None:
    kernel = FusedMoEKernel(layer("kimi", "moectl_marlin"), runner_for("moectl_marlin"), form)
    holds(kernel, "standard" if form is ActivationFormat.STANDARD else "batched")


def holds(kernel: FusedMoEKernel, kind: str) -> None:
    """What calls take at most against what the kernel says; and that is not far more."""
    for count in TOKENS:
        _, call = called(kernel, count)
        size = call().nbytes
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        call()
        torch.cuda.synchronize()
        took = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - size
        said = kernel.workspace(count)
        print(kernel.runner.name, kind, count, "took", took, "said", said)
        assert said is not None
        assert took <= said + EXTRA[kind] * size, (count, took, said)
        if kind == "standard":
            assert said <= 2 * took + (64 << 10), (count, took, said)


def test_compiled_code_calls_the_operator() -> None:
    kernel = KERNELS["standard"]("kimi")
    inputs, call = called(kernel, 48)
    compiled = torch.compile(
        lambda x, ids, weights: kernel.apply(x, ids, weights) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(inputs.x, inputs.ids, inputs.weights), call() * 2)


@pytest.mark.parametrize("form", [BY_TOKEN, BY_BLOCK, MXFP8_ACT, NVFP4_ACT], ids=str)
def test_a_gpu_quantizes_as_a_cpu_does(form: ActFormat) -> None:
    x = tokens()
    scale = torch.full((1,), 0.01) if form == NVFP4_ACT else None
    here = quantize(x, form, scale)
    there = quantize(x.cuda(), form, None if scale is None else scale.cuda())
    assert torch.equal(here.values.view(torch.uint8), there.values.view(torch.uint8).cpu())
    assert torch.equal(here.scales, there.scales.cpu())


def test_routing_itself_is_one_call_too() -> None:
    def monolithic(prepared: PreparedMoE, x: Tensor, logits: Tensor, bias: Tensor | None) -> Tensor:
        assert TRITON.compute is not None
        ids, weights = route(logits, prepared.problem, bias)
        return TRITON.compute(prepared, x, ids, weights)

    runner = replace(TRITON, name="triton on logits", compute=None, monolithic=monolithic)
    kernel = FusedMoEKernel(layer("kimi"), runner, ActivationFormat.MONOLITHIC)
    inputs = inputs_of(LAYERS["kimi"], 48, device="cuda")
    bias = torch.zeros(LAYERS["kimi"].experts, device="cuda")
    expected = FusedMoEKernel(layer("kimi"), TRITON).run(inputs)
    assert same_bits(kernel.run(inputs, bias), expected)
