"""What calls ask for against what they say: host code on tensors without memory, and steps on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for
from torch import Tensor
from triton.runtime.jit import JITFunction

from moectl.kernels.choice.launch import Launch
from moectl.kernels.modular.exchange import SingleRankExchange
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel, map_of
from moectl.kernels.modular.prepare_finalize import SMALLEST as AROUND
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import ActivationFormat, Run, Runner
from moectl.kernels.triton import marlin
from moectl.kernels.triton import triton_runner as triton_runner
from moectl.kernels.triton.workspace import BY_ROWS, SMALLEST, SMALLEST_BLOCK
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import MoEProblem
from moectl.problem.padding import pad
from moectl.problem.published_layers import SCHEMES, model_problem
from support.asked_memory import asked_for
from support.fake_runners import FP8, MXFP8, NVFP4, TORCH
from support.random_layers import KIMI, QWEN, inputs_of, random_layer

from .test_compiled_marlin import without_weights

MODELS = ("gpt-oss-20b", "kimi-k2", "qwen3-30b")
TOKENS = (1, 33, 700, 5000)
FORMS = (ActivationFormat.STANDARD, ActivationFormat.BATCHED)
BATCH = (1, 8, 16, 40)
"""Rows of an expert."""


@pytest.fixture(scope="module", autouse=True)
def launching_nothing() -> Iterator[None]:
    """Host code for a GPU that is not here, whose launches neither compile nor run."""
    with compiling_for(OFFLINE_GPUS[90]), patch.object(JITFunction, "run", lambda *args, **options: None):
        yield


def asks(prepared: PreparedMoE, compute: Run | None, form: ActivationFormat, tokens: int) -> int:
    """Most bytes of a call on tensors without memory."""
    assert compute is not None
    problem, hidden = prepared.problem, prepared.problem.dims.hidden
    if form is ActivationFormat.BATCHED:
        x = torch.empty(problem.local_experts, tokens, hidden, dtype=torch.bfloat16, device="meta")
        counts = torch.empty(problem.local_experts, dtype=torch.int32, device="meta")
        return asked_for(lambda: compute(prepared, x, counts), x, counts, *prepared.weights.values())
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, problem.top_k, dtype=torch.int32, device="meta")
    weights = torch.empty(tokens, problem.top_k, dtype=torch.float32, device="meta")
    given = (x, ids, weights)
    return asked_for(lambda: compute(prepared, *given), *given, *prepared.weights.values())


def holds(runner: Runner, prepared: PreparedMoE, form: ActivationFormat, tokens: int) -> None:
    """No more is asked for than is said, and no more is said than lists explain, of each expert's too."""
    assert runner.workspace is not None
    asks(prepared, runner.in_form(form), form, tokens)  # what is made once is there now
    took = asks(prepared, runner.in_form(form), form, tokens)
    said = runner.workspace(prepared, tokens, form)
    assert took <= said <= 1.25 * took + SMALLEST + 1024 * prepared.problem.local_experts, (took, said)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("family", triton_runner.FAMILIES)
@pytest.mark.parametrize("model", MODELS)
def test_every_family(
    model: str, family: str, form: ActivationFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `tma` reads rows alone.
    problem = model_problem(model, "bf16") if family == "tma" else pad("moectl-mtile64", model_problem(model))
    kernel_family = triton_runner.FAMILIES[family]
    tiles = [tile for tile in kernel_family.candidates(problem) if not kernel_family.fits(problem, tile)]
    prepared, most = empty_layer(problem, "moectl"), kernel_family.tokens_per_expert[1]
    assert tiles or (model, family) == ("gpt-oss-20b", "warpwise")
    # The first and the last one, and one of those that are alike in what the bytes depend on.
    alike = {
        tuple(getattr(tile, name, 0) for name in ("tokens", "split", "fused", "planned")): tile
        for tile in tiles
    }
    for tile in dict.fromkeys((*tiles[:1], *tiles[-1:], *alike.values())):
        monkeypatch.setattr(triton_runner, "launch_on", lambda *a, tile=tile: Launch(family, tile))
        for tokens in BATCH if form is ActivationFormat.BATCHED else TOKENS:
            if tokens * problem.top_k / problem.local_experts <= 2 * most:
                holds(runner_for("moectl"), prepared, form, tokens)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("family", ["mid", "prefill"])
def test_split_reductions(family: str, form: ActivationFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = pad("moectl-mtile64", model_problem("mixtral-8x7b", "int4-g128"))
    tiles = {it.split: it for it in triton_runner.FAMILIES[family].candidates(problem)}
    assert len(tiles) > 2
    for tile in tiles.values():
        monkeypatch.setattr(triton_runner, "launch_on", lambda *a, tile=tile: Launch(family, tile))
        for tokens in BATCH if form is ActivationFormat.BATCHED else TOKENS:
            holds(runner_for("moectl"), empty_layer(problem, "moectl"), form, tokens)


def test_the_smallest_block_is_that_of_the_families_for_batches_with_few_tokens() -> None:
    tiles = [
        tile
        for name, family in triton_runner.FAMILIES.items()
        if name not in BY_ROWS
        for format in SCHEMES
        for tile in family.candidates(pad("moectl-mtile64", model_problem("qwen3-30b", format)))
    ]
    assert min(getattr(tile, "tokens", 16) for tile in tiles) == SMALLEST_BLOCK


def test_tiles_that_quantize_need_no_activations_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = model_problem("qwen3-30b", "fp8-block")
    prepared, runner, tokens = empty_layer(problem, "moectl"), runner_for("moectl"), 5000
    said = {}
    for tile in triton_runner.FAMILIES["tma"].candidates(problem):
        if tile.tokens == 128:
            monkeypatch.setattr(triton_runner, "launch_on", lambda *a, tile=tile: Launch("tma", tile))
            holds(runner, prepared, ActivationFormat.STANDARD, tokens)
            assert runner.workspace is not None
            said[tile.quantizes] = runner.workspace(prepared, tokens, ActivationFormat.STANDARD)
    assert said[False] - said[True] == 2 * tokens * problem.top_k * problem.dims.intermediate


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("model", ["kimi-k2", "qwen3-30b"])
def test_marlin_s_layout(model: str, form: ActivationFormat) -> None:
    prepared = without_weights(model_problem(model))
    for tokens in BATCH if form is ActivationFormat.BATCHED else TOKENS:
        holds(marlin.RUNNER, prepared, form, tokens)


def like_tokens(prepared: PreparedMoE, x: Tensor, *arguments: Tensor) -> Tensor:
    return torch.zeros((*x.shape[:-1], prepared.problem.dims.hidden), dtype=torch.bfloat16)


def quietly(runner: Runner) -> Runner:
    """`runner` with nothing in it, which takes its result alone."""

    def made(prepared: PreparedMoE, x: object, *arguments: Tensor) -> Tensor:
        tokens = x if isinstance(x, Tensor) else x.values  # type: ignore[attr-defined]
        return like_tokens(prepared, tokens)

    return replace(runner, compute=made, batched=made, workspace=lambda *arguments: 0)


def part_of(problem: MoEProblem) -> PreparedMoE:
    return replace(whole(problem), problem=replace(problem, local_experts=3), first_expert=1)


def whole(problem: MoEProblem) -> PreparedMoE:
    return random_layer(problem).prepared("torch", "cpu")


KERNELS: dict[str, Callable[[ActivationFormat], FusedMoEKernel]] = {
    "nothing around": lambda form: FusedMoEKernel(whole(KIMI), quietly(TORCH), form),
    "some of the experts": lambda form: FusedMoEKernel(
        part_of(KIMI), quietly(TORCH), form, expert_map=map_of(part_of(KIMI))
    ),
    "fp8 tokens": lambda form: FusedMoEKernel(whole(QWEN), quietly(FP8), form),
    "mxfp8 tokens": lambda form: FusedMoEKernel(whole(QWEN), quietly(MXFP8), form),
    "nvfp4 tokens": lambda form: FusedMoEKernel(whole(QWEN), quietly(NVFP4), form),
    "fp32 result": lambda form: FusedMoEKernel(whole(KIMI), quietly(TORCH), form, dtype=torch.float32),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("kind", KERNELS)
def test_the_steps_around_experts(kind: str, form: ActivationFormat) -> None:
    kernel = KERNELS[kind](form)
    for tokens in (1, 30, 400):
        inputs = inputs_of(kernel.prepared.problem, tokens)
        given = (inputs.x, inputs.ids, inputs.weights)
        took = asked_for(partial(kernel.apply, *given), *given)
        said = kernel.workspace(tokens)
        print(kind, form.name, tokens, took, said)
        small = 2 * AROUND + 32 * inputs.ids.numel()
        assert said is not None and took <= said <= 4 * took + small, (tokens, took, said)


def test_experts_are_counted_with_the_tokens_of_every_rank() -> None:
    rows: list[int] = []

    def workspace(prepared: PreparedMoE, tokens: int, form: ActivationFormat) -> int:
        rows.append(tokens)
        return 1000 * tokens

    kernels = [
        FusedMoEKernel(
            whole(KIMI), replace(quietly(TORCH), workspace=workspace), exchange=exchange, dtype=dtype
        )
        for exchange in (SingleRankExchange(), SingleRankExchange(ranks=2))
        for dtype in (None, torch.float32)
    ]
    said = [kernel.workspace(5) for kernel in kernels]
    assert rows == [5, 5, 10, 10]
    assert None not in said and said[3] - said[2] == 2 * (said[1] - said[0]) > 0  # type: ignore[operator]
