"""A layer's kernel on one rank: forms, formats, shared experts, expert maps, dtypes, operators, threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moectl.errors import NoBackend, UsageError
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel, kernel_of, map_of
from moectl.kernels.modular.torch_ops import fused_moe, fused_moe_logits, kernel_at
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.quantize_tokens import dequantize, quantize
from moectl.kernels.registry import RUNNERS, runner_for
from moectl.kernels.runner import ActivationFormat, Runner
from moectl.problem.moe_problem import MoEProblem
from moectl.problem.schemes import ActFormat
from support.fake_runners import FP8, MONOLITHIC, MXFP8, NVFP4, STATIC, TORCH, UNWEIGHED, wanting
from support.random_layers import (
    FAMILIES,
    GPT_OSS,
    KIMI,
    QWEN,
    canonical_roles,
    inputs_of,
    judged,
    layer_of,
    random_layer,
    skipping,
)

ON_INPUT = replace(KIMI, routing=replace(KIMI.routing, weight_on_input=True))


def prepared_of(problem: MoEProblem) -> PreparedMoE:
    return random_layer(problem).prepared("torch", "cpu")


def bias_of(problem: MoEProblem) -> Tensor | None:
    return torch.zeros(problem.experts) if problem.routing.correction_bias else None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 20])
@pytest.mark.parametrize(
    ("runner", "form"),
    [
        (TORCH, ActivationFormat.STANDARD),
        (TORCH, ActivationFormat.BATCHED),
        (UNWEIGHED, ActivationFormat.STANDARD),
        (MONOLITHIC, ActivationFormat.MONOLITHIC),
    ],
)
def test_every_form_agrees_with_the_reference(
    family: str, tokens: int, runner: Runner, form: ActivationFormat
) -> None:
    problem = FAMILIES[family]
    layer = random_layer(problem)
    prepared = layer.prepared("torch", "cpu")
    inputs = inputs_of(problem, tokens)
    kernel = FusedMoEKernel(prepared, runner, form)
    y = kernel.run(inputs, bias_of(problem) if kernel.monolithic else None)
    assert y.dtype == inputs.x.dtype
    assert judged(layer, prepared, y, inputs).ok


@pytest.mark.parametrize("form", [ActivationFormat.STANDARD, ActivationFormat.BATCHED])
@pytest.mark.parametrize("runner", [TORCH, UNWEIGHED])
@pytest.mark.parametrize("problem", [KIMI, ON_INPUT], ids=["on output", "on input"])
def test_weights_on_either_side_and_skipped_assignments(
    runner: Runner, form: ActivationFormat, problem: MoEProblem
) -> None:
    if form not in runner.forms:
        with pytest.raises(NoBackend, match="takes expert ids and weights, not tokens batched by expert"):
            FusedMoEKernel(prepared_of(problem), runner, form)
        return
    layer = random_layer(problem)
    prepared = layer.prepared("torch", "cpu")
    inputs = skipping(inputs_of(problem, 12), every=3)
    y = FusedMoEKernel(prepared, runner, form).run(inputs)
    assert judged(layer, prepared, y, inputs).ok
    assert not y[0].any()


@pytest.mark.parametrize("form", [ActivationFormat.STANDARD, ActivationFormat.BATCHED])
@pytest.mark.parametrize("runner", [FP8, MXFP8, NVFP4], ids=lambda runner: runner.wants_of(QWEN).name)
def test_experts_get_the_tokens_that_they_want(runner: Runner, form: ActivationFormat) -> None:
    layer = random_layer(QWEN)
    prepared = layer.prepared("torch", "cpu")
    scale = torch.full((1,), 0.01)
    if runner is NVFP4:
        prepared = replace(prepared, weights={**prepared.weights, "w13_input": scale})
    inputs = inputs_of(QWEN, 9)
    told = replace(runner, wants=lambda problem: runner.wants_of(problem))
    y = FusedMoEKernel(prepared, told if form is ActivationFormat.BATCHED else runner, form).run(inputs)
    given = scale if runner is NVFP4 else None
    rounded = dequantize(quantize(inputs.x, runner.wants_of(QWEN), given), given).bfloat16()
    assert judged(layer, prepared, y, replace(inputs, x=rounded)).ok
    assert not judged(layer, prepared, y, inputs).ok, "tokens were not rounded at all"


def test_router_weights_multiply_tokens_before_they_are_quantized() -> None:
    problem = replace(QWEN, top_k=1, routing=replace(QWEN.routing, weight_on_input=True, scale=0.7))
    layer = random_layer(problem)
    prepared = layer.prepared("torch", "cpu")
    inputs = inputs_of(problem, 9)
    y = FusedMoEKernel(prepared, FP8).run(inputs)
    weighed = (inputs.x * inputs.weights).bfloat16()
    rounded = dequantize(quantize(weighed, FP8.wants_of(problem))).bfloat16()
    seen = replace(inputs, x=rounded, weights=torch.ones_like(inputs.weights))
    assert judged(layer, prepared, y, seen).ok


def part_of(problem: MoEProblem, first: int, last: int) -> PreparedMoE:
    """Experts `first` to `last` (exclusive) of a random layer."""
    roles = {role: t[first:last] for role, t in canonical_roles(problem).items()}
    part = layer_of(replace(problem, local_experts=last - first), roles).prepared("torch", "cpu")
    return replace(part, first_expert=first)


@pytest.mark.parametrize("form", [ActivationFormat.STANDARD, ActivationFormat.BATCHED])
def test_experts_of_other_ranks_are_skipped_by_the_map(form: ActivationFormat) -> None:
    problem = KIMI
    whole, part = random_layer(problem), part_of(problem, 3, 7)
    inputs = skipping(inputs_of(problem, 30), every=5)
    found = map_of(part)
    assert found.tolist() == [-1, -1, -1, 0, 1, 2, 3, -1, -1]
    y = FusedMoEKernel(part, TORCH, form, expert_map=found).run(inputs)
    here = (inputs.ids >= 3) & (inputs.ids < 7)
    expected = replace(inputs, ids=torch.where(here, inputs.ids, -1))
    assert here.any() and not here.all()
    assert judged(whole, whole.prepared("torch", "cpu"), y, expected).ok
    with pytest.raises(UsageError, match="ids must be below 9, the layer's experts; got 9"):
        FusedMoEKernel(part, TORCH, form, expert_map=found).run(
            replace(inputs, ids=torch.full_like(inputs.ids, 9))
        )


def test_batches_are_expected_to_have_their_share_of_the_assignments() -> None:
    """30 tokens of 4 of 9 experts each: 14 an expert, of a rank's 4 experts, too."""
    part, said = part_of(KIMI, 3, 7), []

    def batched(prepared: PreparedMoE, x: torch.Tensor, counts: torch.Tensor, expected: int) -> torch.Tensor:
        said.append((x.shape[:2], expected))
        return x

    runner = replace(TORCH, batched=batched)
    for prepared, experts in ((random_layer(KIMI).prepared("torch", "cpu"), 9), (part, 4)):
        where = map_of(prepared) if experts == 4 else None
        FusedMoEKernel(prepared, runner, ActivationFormat.BATCHED, expert_map=where).run(inputs_of(KIMI, 30))
        assert said.pop() == ((experts, 30), -(-30 * KIMI.top_k // 9))


def test_a_map_may_place_experts_anywhere() -> None:
    roles = {role: t[[8, 2, 5]] for role, t in canonical_roles(KIMI).items()}
    part = layer_of(replace(KIMI, local_experts=3), roles).prepared("torch", "cpu")
    where = torch.tensor([-1, -1, 1, -1, -1, 2, -1, -1, 0], dtype=torch.int32)
    inputs = inputs_of(KIMI, 30)
    y = FusedMoEKernel(part, TORCH, expert_map=where).run(inputs)
    whole = random_layer(KIMI)
    here = (inputs.ids == 8) | (inputs.ids == 2) | (inputs.ids == 5)
    expected = replace(inputs, ids=torch.where(here, inputs.ids, -1))
    assert judged(whole, whole.prepared("torch", "cpu"), y, expected).ok
    with pytest.raises(NoBackend, match="is monolithic here, and routes to the layer's experts 0 to 2 alone"):
        FusedMoEKernel(part, MONOLITHIC, ActivationFormat.MONOLITHIC, expert_map=where)


def test_a_monolithic_kernel_takes_the_map_of_experts_that_follow_each_other() -> None:
    whole, part, inputs = random_layer(KIMI), part_of(KIMI, 3, 7), inputs_of(KIMI, 30)
    kernel = FusedMoEKernel(part, MONOLITHIC, ActivationFormat.MONOLITHIC, expert_map=map_of(part))
    y = kernel.run(inputs, bias_of(KIMI))
    expected = replace(inputs, ids=torch.where((inputs.ids >= 3) & (inputs.ids < 7), inputs.ids, -1))
    assert judged(whole, whole.prepared("torch", "cpu"), y, expected).ok


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    r"must be int32 \[9\] on cpu, got torch.int64 \[9\]": lambda m: m.long(),
    r"must be int32 \[9\] on cpu, got torch.int32 \[8\]": lambda m: m[1:],
    "each of 4 experts here once and others -1, got 5 from 0 to 3": lambda m: torch.where(m == -1, 0, m)[
        torch.tensor([0, 3, 4, 5, 6, 1, 1, 1, 1])
    ].scatter(0, torch.tensor([5, 6, 7, 8]), -1),
    "got 0 from none to none": lambda m: torch.full_like(m, -1),
}


@pytest.mark.parametrize("says", MAPS)
def test_maps_that_do_not_fit_are_refused(says: str) -> None:
    part = part_of(KIMI, 3, 7)
    with pytest.raises(UsageError, match=says):
        FusedMoEKernel(part, TORCH, expert_map=MAPS[says](map_of(part)).contiguous())


@pytest.mark.parametrize("form", [ActivationFormat.STANDARD, ActivationFormat.BATCHED])
def test_shared_experts_are_added_in_the_result_s_dtype(form: ActivationFormat) -> None:
    layer = random_layer(KIMI)
    prepared = layer.prepared("torch", "cpu")
    inputs = inputs_of(KIMI, 7)
    plain = FusedMoEKernel(prepared, TORCH, form).run(inputs)
    kernel = FusedMoEKernel(prepared, TORCH, form, shared=lambda x: x.float() * 3, dtype=torch.float32)
    y = kernel.run(inputs)
    assert y.dtype == torch.float32
    assert torch.allclose(y, plain.float() + 3 * inputs.x.float(), atol=2**-7 * float(plain.abs().max()))
    assert kernel.run(inputs_of(KIMI, 0)).dtype == torch.float32


REFUSED: dict[str, Callable[[], object]] = {
    "is monolithic here, and takes no shared experts": lambda: FusedMoEKernel(
        prepared_of(KIMI), MONOLITHIC, ActivationFormat.MONOLITHIC, shared=lambda x: x
    ),
    "computes experts of 192 columns, shared experts have the model's 512": lambda: FusedMoEKernel(
        prepared_of(replace(KIMI, model_hidden=512)), TORCH, shared=lambda x: x
    ),
    "takes router logits, not expert ids and weights": lambda: FusedMoEKernel(prepared_of(KIMI), MONOLITHIC),
    "takes expert ids and weights or tokens batched by expert, not router logits": lambda: FusedMoEKernel(
        prepared_of(KIMI), TORCH, ActivationFormat.MONOLITHIC
    ),
    "192 columns are no whole number of blocks of 128": lambda: FusedMoEKernel(prepared_of(KIMI), FP8),
    "the layer has no scale of its inputs": lambda: FusedMoEKernel(prepared_of(QWEN), STATIC),
    "wants tokens in fp6 dynamic: there are quantizers to": lambda: FusedMoEKernel(
        prepared_of(QWEN), wanting(ActFormat("fp6", 6, (1, 128)))
    ),
    "cannot be multiplied by the weights of 2 experts": lambda: FusedMoEKernel(
        prepared_of(replace(QWEN, routing=replace(QWEN.routing, weight_on_input=True))), FP8
    ),
    "reads layout moectl-mtile64, got weights in canonical": lambda: FusedMoEKernel(
        prepared_of(KIMI), runner_for("moectl")
    ),
    "takes router logits, got expert ids and weights": lambda: FusedMoEKernel(
        prepared_of(KIMI), MONOLITHIC, ActivationFormat.MONOLITHIC
    ).apply(*arguments(KIMI)),
    "takes expert ids and weights, got router logits": lambda: kernel_of(prepared_of(KIMI)).apply_monolithic(
        inputs_of(KIMI, 2).x, inputs_of(KIMI, 2).logits
    ),
    "there is no kernel for meta devices; kernels here run on GPUs": lambda: FusedMoEKernel(
        replace(prepared_of(KIMI), weights={"w13": torch.empty(1, device="meta")}), TORCH
    ),
}


def arguments(problem: MoEProblem, tokens: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    inputs = inputs_of(problem, tokens)
    return inputs.x, inputs.ids, inputs.weights


@pytest.mark.parametrize("says", REFUSED)
def test_parts_that_do_not_fit_are_refused_in_a_sentence(says: str) -> None:
    with pytest.raises(NoBackend, match=says) as found:
        REFUSED[says]()
    assert found.value.what.startswith(("the ", "there is no kernel")) and "\n" not in found.value.what


@pytest.mark.parametrize(
    ("logits", "says"),
    [
        (torch.zeros(2, 8), r"must be floats \[2, 9\], got torch.float32 \[2, 8\]"),
        (torch.zeros(3, 9), r"got torch.float32 \[3, 9\]"),
        (torch.zeros(2, 9, dtype=torch.int32), "got torch.int32"),
    ],
)
def test_logits_that_do_not_fit_are_refused(logits: Tensor, says: str) -> None:
    kernel = FusedMoEKernel(prepared_of(KIMI), MONOLITHIC, ActivationFormat.MONOLITHIC)
    with pytest.raises(UsageError, match=says):
        kernel.apply_monolithic(inputs_of(KIMI, 2).x, logits, torch.zeros(9))


def test_a_runner_s_forms_are_what_it_has() -> None:
    for name in RUNNERS:
        try:
            runner = runner_for(name)
        except NoBackend:
            continue
        assert runner.forms and all(runner.in_form(form) for form in runner.forms)
    assert kernel_of(prepared_of(KIMI)).form is ActivationFormat.STANDARD
    assert not kernel_of(prepared_of(KIMI)).monolithic


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_sees_one_operator(dynamic: bool) -> None:
    one, other = (kernel_of(random_layer(KIMI, seed).prepared("torch", "cpu")) for seed in (0, 1))

    def layers(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return other.apply(one.apply(x, ids, weights) * 2, ids, weights) + 1

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (3, 5, 4):
        given = arguments(KIMI, tokens)
        assert torch.equal(compiled(*given), layers(*given))


def test_torch_compile_keeps_the_result_s_dtype_and_takes_logits() -> None:
    prepared = prepared_of(KIMI)
    kernel = FusedMoEKernel(prepared, MONOLITHIC, ActivationFormat.MONOLITHIC, dtype=torch.float32)
    compiled = torch.compile(
        lambda x, logits, bias: kernel.apply_monolithic(x, logits, bias) / 2,
        fullgraph=True,
        backend="aot_eager",
    )
    inputs, bias = inputs_of(KIMI, 4), torch.linspace(0, 1, 9)
    y = compiled(inputs.x, inputs.logits, bias)
    assert y.dtype == torch.float32
    assert torch.equal(y, kernel.apply_monolithic(inputs.x, inputs.logits, bias) / 2)


def test_operators_keep_their_promises() -> None:
    prepared = prepared_of(KIMI)
    kernel, routes = kernel_of(prepared), FusedMoEKernel(prepared, MONOLITHIC, ActivationFormat.MONOLITHIC)
    inputs = inputs_of(KIMI, 3)
    check: Any = torch.library.opcheck
    check(fused_moe, (inputs.x, inputs.ids, inputs.weights, kernel.handle, inputs.x.dtype))
    given = (inputs.x, inputs.logits, torch.zeros(9), routes.handle, inputs.x.dtype)
    check(fused_moe_logits, given)


def test_a_kernel_that_is_gone_is_not_another_layer_s() -> None:
    kernel = kernel_of(prepared_of(KIMI))
    handle = kernel.handle
    assert kernel_at(handle) is kernel
    del kernel
    with pytest.raises(UsageError, match=f"there is no layer kernel {handle} any more"):
        kernel_at(handle)
    assert kernel_of(prepared_of(KIMI)).handle > handle


def test_threads_call_two_layers_at_once() -> None:
    kernels = [kernel_of(random_layer(problem).prepared("torch", "cpu")) for problem in (KIMI, GPT_OSS)]
    inputs = [inputs_of(kernel.prepared.problem, 9) for kernel in kernels]
    expected = [kernel.run(given) for kernel, given in zip(kernels, inputs, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(kernels[i % 2].run, inputs[i % 2]) for i in range(40)]
        found = [call.result() for call in calls]
    assert all(torch.equal(y, expected[i % 2]) for i, y in enumerate(found))
