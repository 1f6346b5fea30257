"""What is derived from a layer's weights once: the range of its scales."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS

from moectl.errors import UsageError
from moectl.kernels.choice.launch_plan import launch_for
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import Runner
from moectl.kernels.triton import kernel_family
from moectl.kernels.triton.expert_batches import CHOSEN_FOR
from moectl.kernels.triton.hopper.gemm_spec import exact_weights
from moectl.kernels.triton.kernel_family import exponents_of, exponents_of_each, layer_of
from moectl.kernels.triton.offline_gpu import standing_in
from moectl.kernels.triton.triton_runner import aligned, batch_launch, run_batch_with, run_with
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import Activation
from moectl.problem.padding import pad
from moectl.problem.published_layers import model_problem
from moectl.problem.schemes import MXFP8, NVFP4, Scheme, int_format
from support.random_layers import GPT_OSS, KIMI, canonical_roles
from support.random_layers import layer_of as expert_layer


def test_the_range_of_e8m0_scales_leaves_padding_out() -> None:
    roles = canonical_roles(GPT_OSS)
    roles["w13_scale"].fill_(120)
    roles["w13_scale"][0, 0, 0], roles["w13_scale"][1, 5, 1] = 70, 190
    made = layer_of(expert_layer(GPT_OSS, roles).prepared("moectl", "cpu"))
    assert made.w13.exponents == (70, 190)
    assert made.w13.exponents_within(range(64, 191)) and not made.w13.exponents_within(range(71, 191))


@pytest.mark.parametrize("experts", [4, 37])
def test_the_range_of_bf16_scales_is_of_their_exponents_without_signs_and_zeros(experts: int) -> None:
    scales = torch.full((experts, 64, 2), 0.75, dtype=torch.bfloat16)
    scales[0] = 0.0
    scales[1, 0, 0], scales[1, 0, 1] = -0.0, -(2.0**-60)
    scales[-1, 5, 1] = -1.5 * 2.0**20
    assert exponents_of(scales.view(torch.int32), "bf16") == (127 - 60, 127 + 20)
    scales[2, 0, 0] = 2.0**-130
    assert exponents_of(scales.view(torch.int32), "bf16") == (0, 127 + 20)


@pytest.mark.parametrize("gated", [True, False])
def test_global_scales_are_factors_of_experts(gated: bool) -> None:
    problem = replace(KIMI, scheme=Scheme(NVFP4))
    if not gated:
        problem = replace(problem, activation=Activation("relu2", gated=False))
    roles = canonical_roles(problem)
    prepared = expert_layer(problem, roles).prepared("moectl", "cpu")
    made = layer_of(prepared)
    assert (made.w13.halves, made.w2.halves) == (2 if gated else 1, 1)
    assert torch.equal(made.w13.factors, roles["w13_global"][..., 0])
    assert torch.equal(made.w2.factors, roles["w2_global"][..., 0])
    assert not exact_weights(problem, made.w13)
    for wrong in ({}, {"w2_global": prepared.weights["w2_global"][:1]}):
        weights = {role: t for role, t in prepared.weights.items() if role != "w2_global"} | wrong
        with pytest.raises(UsageError, match=r"w2_global must be \[\d+, 1, 1\], got "):
            layer_of(replace(prepared, weights=weights, derived={}))


def test_mxfp8_is_exact_beyond_the_range_of_its_scales_and_with_nan() -> None:
    problem = replace(KIMI, scheme=Scheme(MXFP8))
    roles = canonical_roles(problem)
    made = layer_of(expert_layer(problem, roles).prepared("moectl", "cpu"))
    assert not exact_weights(problem, made.w13) and not exact_weights(problem, made.w2)
    roles["w13_scale"][0, 0, 0] = 65
    roles["w2"][1, 2, 3] = 0x7F
    made = layer_of(expert_layer(problem, roles).prepared("moectl", "cpu"))
    assert exact_weights(problem, made.w13) and exact_weights(problem, made.w2)
    assert (made.w13.numbers, made.w2.numbers) == (True, False)


def test_scales_are_examined_in_pieces_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_family, "EXAMINED_BYTES", 96)
    scales = [torch.full((5, 64), 127, dtype=torch.uint8) for _ in range(3)]
    scales[0][0], scales[0][4, 60], scales[0][2, 1] = 0, 255, 1
    scales[2][:] = 0
    views = [t.view(torch.int32) for t in scales]
    assert exponents_of_each(views, "e8m0") == [(1, 255), (127, 127), (255, 0)]
    waits: list[int] = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: waits.append(1) or to_list(t))
    assert exponents_of_each([views[1], views[1]], "e8m0") == [(127, 127), (127, 127)] and waits == [1]
    # Zeros, which are left out, take a second look.
    assert exponents_of_each([views[1], views[0]], "e8m0") == [(127, 127), (1, 255)] and waits == 3 * [1]


def test_scales_that_no_kernel_folds_have_no_range() -> None:
    assert exponents_of(torch.ones(1, 1, 1, 32, dtype=torch.int32), "fp16") is None
    problem = replace(KIMI, scheme=Scheme(int_format(4, 32, "F16")))
    made = layer_of(expert_layer(problem, canonical_roles(problem)).prepared("moectl", "cpu"))
    assert made.w13.exponents is None and not made.w13.exponents_within(range(256))


SCALES = [
    (2.0**-93, False),
    (2.0**-94, True),
    (1.5 * 2.0**31, False),
    (2.0**32, True),
    (1e-39, True),
    (0.0, False),
    (-0.5, False),
]


@pytest.mark.parametrize(("scale", "exact"), SCALES)
def test_int4_is_folded_only_where_every_scale_of_the_layer_allows_it(scale: float, exact: bool) -> None:
    roles = canonical_roles(KIMI)
    roles["w2_scale"][0, 3, 0] = scale
    made = layer_of(expert_layer(KIMI, roles).prepared("moectl", "cpu"))
    assert exact_weights(KIMI, made.w2) is exact and not exact_weights(KIMI, made.w13)


@pytest.mark.parametrize("role", ["w13_bias", "w2_bias"])
def test_a_bias_that_the_problem_does_not_have_is_refused_and_so_is_one_that_is_missing(role: str) -> None:
    prepared = expert_layer(GPT_OSS, canonical_roles(GPT_OSS)).prepared("moectl", "cpu")
    others = {name: t for name, t in prepared.weights.items() if name != role}
    with pytest.raises(UsageError, match=f"a layer with bias=True needs {role}, got None"):
        layer_of(replace(prepared, weights=others, derived={}))
    with pytest.raises(UsageError, match="a layer with bias=False must not have w13_bias, got"):
        layer_of(replace(prepared, problem=replace(prepared.problem, bias=False), derived={}))


def test_a_layer_is_looked_at_once() -> None:
    prepared = expert_layer(GPT_OSS, canonical_roles(GPT_OSS)).prepared("moectl", "cpu")
    assert layer_of(prepared) is layer_of(prepared)


def test_preparing_makes_a_layer_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a runner can run the layer; elsewhere it is for reading only."""
    seen: list[PreparedMoE] = []
    runner = runner_for("torch")
    ready = Runner("torch", None, runner.compute, runner.refusal, ready=seen.append)
    monkeypatch.setattr("moectl.layer.experts.runner_for", lambda name: ready)
    prepared = expert_layer(GPT_OSS, canonical_roles(GPT_OSS)).prepared("torch", torch.device("cpu"))
    assert seen == [prepared]
    refusing = Runner("torch", None, runner.compute, lambda problem, device: "no", ready=seen.append)
    monkeypatch.setattr("moectl.layer.experts.runner_for", lambda name: refusing)
    expert_layer(GPT_OSS, canonical_roles(GPT_OSS)).prepared("torch", torch.device("cpu"))
    assert len(seen) == 1


def test_tokens_are_copied_where_kernels_could_not_read_them() -> None:
    whole = torch.arange(200.0).bfloat16()
    odd, even = whole[1:129].view(2, 64), whole[:128].view(2, 64)
    assert aligned(even) is even
    made = aligned(odd)
    assert made.data_ptr() % 16 == 0 and torch.equal(made, odd)
    assert aligned(even.T).is_contiguous()


@pytest.mark.parametrize("scheme", [Scheme(MXFP8), KIMI.scheme], ids=str)
def test_tokens_have_the_layer_s_dtype(scheme: Scheme) -> None:
    """Kernels turn codes into numbers of the layer's dtype, and read tokens as bytes of it."""
    problem = replace(KIMI, scheme=scheme)
    prepared = expert_layer(problem, canonical_roles(problem)).prepared("moectl", "cpu")
    ids, weights = torch.zeros(3, problem.top_k, dtype=torch.int32), torch.ones(3, problem.top_k)
    x = torch.zeros(3, problem.dims.hidden, dtype=torch.float16)
    launch = launch_for(problem, 3)
    with pytest.raises(UsageError, match=r"x must be torch.bfloat16, the model's dtype, got torch.float16"):
        run_with(prepared, x, ids, weights, launch)
    batch = torch.zeros(problem.local_experts, 2, problem.dims.hidden, dtype=torch.float16)
    with pytest.raises(UsageError, match=r"x must be torch.bfloat16, the model's dtype, got torch.float16"):
        run_batch_with(prepared, batch, torch.zeros(problem.local_experts, dtype=torch.int32), launch)


def test_batches_take_the_launch_of_the_tokens_that_are_expected() -> None:
    """But not one that has programs for all rows."""
    for name, rows, family in (
        ("kimi-k2", 8, "mid"),
        ("gpt-oss-120b", 1, "mid"),
        ("gpt-oss-120b", 500, "prefill"),
    ):
        problem = replace(pad("moectl-mtile64", model_problem(name)), local_experts=16)
        layer = empty_layer(problem, "moectl")
        with standing_in(OFFLINE_GPUS[90]):
            layer.derived[CHOSEN_FOR] = torch.device("cuda")
            full, few = batch_launch(layer, 512), batch_launch(layer, 512, rows)
            assert full.family == "prefill" and full == batch_launch(layer, 512, 512)
            assert few.family == family and (few == full) == (family == "prefill")
            assert full == batch_launch(layer, 512, 9000)


def test_kernels_are_imported_when_they_are_launched() -> None:
    """Triton reads each function of theirs, which a server that starts would wait for."""
    code = (
        "import sys, moectl.kernels.triton.triton_runner, moectl.layer.background_compile\n"
        "own = (m for m in sys.modules if m.startswith('moectl.kernels.triton.'))\n"
        "print(*(m.rpartition('.')[2] for m in own if m.endswith('_kernels')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    # Every layer sorts its tokens.
    assert set(done.stdout.split()) == {"sort_and_combine_kernels", "mtile64_kernels"}, done.stderr
