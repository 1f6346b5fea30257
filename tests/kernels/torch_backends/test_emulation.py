"""Emulation: activations rounded as declared, in every format, and nothing else done to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moectl.convert.codecs import codec_for
from moectl.errors import NoBackend
from moectl.kernels.layer_inputs import LayerInputs, make_inputs
from moectl.kernels.prepared_layer import DenseExpert, PreparedMoE
from moectl.kernels.quantize_tokens import refusal
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.kernels.tolerance import check, tolerance_for
from moectl.kernels.torch_backends.emulation import RUNNER, rounded
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.number_formats import NUMBER_FORMATS
from moectl.problem.schemes import (
    BF16,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    MXFP4,
    MXFP4_ACT,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    NVFP4_ACT,
    ActFormat,
    Scheme,
    WeightFormat,
    act_format,
    int_format,
)
from support.random_layers import skipping
from support.runners import apply

BY_TOKEN, BY_128 = ActFormat("fp8", 8, (1, FULL)), ActFormat("fp8", 8, (1, 128))
STATIC, ALL = ActFormat("fp8", 8, (FULL, FULL), dynamic=False), ActFormat("fp8", 8, (FULL, FULL))
INT8 = ActFormat("int8", 8, (1, FULL))
SCHEMES = {
    "fp8 by channel and token": Scheme(FP8_CHANNEL, BY_TOKEN),
    "fp8 static": Scheme(FP8_TENSOR, STATIC),
    "fp8 one scale made at run time": Scheme(FP8_TENSOR, ALL),
    "fp8 blocks": Scheme(FP8_BLOCK, BY_128),
    "mxfp8": Scheme(MXFP8, MXFP8_ACT),
    "mxfp4 with mxfp8": Scheme(MXFP4, MXFP8_ACT),
    "mxfp4": Scheme(MXFP4, MXFP4_ACT),
    "nvfp4": Scheme(NVFP4, NVFP4_ACT),
    "int8": Scheme(int_format(8, FULL), INT8),
    "int4 with fp8": Scheme(int_format(4, 128), BY_TOKEN),
}
ACTIVATIONS = {"silu": SILU, "gpt-oss": SWIGLU_OAI, "relu2": Activation("relu2", gated=False)}


def problem_of(scheme: Scheme, activation: Activation = SILU) -> MoEProblem:
    return MoEProblem(Dims(256, 128), experts=4, top_k=2, scheme=scheme, activation=activation)


def layer_of(problem: MoEProblem) -> PreparedMoE:
    return RandomLayer(problem, torch.device("cpu")).experts.prepared("emulation", "cpu")


def inputs_of(problem: MoEProblem, tokens: int = 24) -> LayerInputs:
    return make_inputs(problem, tokens, seed=90001)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_as_far_off_as_its_activations_are_coarse(scheme: str, activation: str) -> None:
    problem = problem_of(SCHEMES[scheme], ACTIVATIONS[activation])
    prepared, inputs = layer_of(problem), inputs_of(problem)
    y = apply(RUNNER, prepared, inputs.x, inputs.ids, inputs.weights)
    exact = moe_reference(inputs.x, inputs.ids, inputs.weights, prepared.expert, problem)
    result = check(y, exact, tolerance_for(problem, RUNNER.accumulation))
    assert result.ok, result
    # Half of what the row allows was measured: an activation left out would be far below.
    allowed = problem.scheme.act.number.token_tolerance
    assert allowed is not None and result.rms > allowed.rms / 8, result


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_is_the_torch_backend_where_activations_stay_wide(weight_on_input: bool) -> None:
    problem = replace(problem_of(Scheme(BF16)), routing=Routing("sigmoid", weight_on_input=weight_on_input))
    prepared, inputs = layer_of(problem), skipping(inputs_of(problem), every=3)
    y = apply(RUNNER, prepared, inputs.x, inputs.ids, inputs.weights)
    twin = replace(prepared, backend="torch")
    torch.testing.assert_close(y, apply(runner_for("torch"), twin, inputs.x, inputs.ids, inputs.weights))
    assert not y[0].any()


CODECS: dict[str, tuple[WeightFormat, str]] = {
    "fp8": (WeightFormat("fp8", 8, (1, FULL), "F32"), "floor"),
    "mxfp8": (MXFP8, "up"),
    "mxfp4": (MXFP4, "even"),
}
FORMS = {"fp8": BY_TOKEN, "mxfp8": MXFP8_ACT, "mxfp4": MXFP4_ACT}


def tokens_of_every_size() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 256, generator=generator)
    return x * torch.exp2(torch.randint(-12, 12, (40, 1), generator=generator).float())


@pytest.mark.parametrize("name", CODECS)
def test_tokens_are_rounded_as_the_codec_of_the_same_weights_rounds(name: str) -> None:
    weight, rule = CODECS[name]
    x = tokens_of_every_size()
    codec = codec_for(weight, rule)
    encoded = codec.encode(x.unsqueeze(0))
    torch.testing.assert_close(rounded(x, FORMS[name]), codec.decode(*encoded)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("static", [False, True])
def test_int8_tokens_have_127_even_steps_on_either_side(static: bool) -> None:
    x = tokens_of_every_size()
    scale = torch.tensor(1 / 16) if static else None
    step = torch.full((40, 1), 1 / 16) if static else x.abs().amax(1, keepdim=True) / 127
    made = rounded(x, replace(INT8, block=(FULL, FULL), dynamic=False) if static else INT8, scale)
    codes = made / step
    torch.testing.assert_close(codes, codes.round(), rtol=1e-5, atol=1e-5)
    assert codes.abs().max() <= 127 * (1 + 1e-6)
    within = x.abs() <= 127 * step
    assert ((made - x).abs()[within] <= 0.5001 * step.expand_as(x)[within]).all()


def test_nvfp4_tokens_are_rounded_under_the_layers_scale() -> None:
    x = tokens_of_every_size().clamp(-40, 40)
    scale = torch.tensor(1 / 64)
    codec = codec_for(NVFP4)
    parts = x.view(40, 16, 16)
    blocks = (parts.abs().amax(-1) / 6 * 64).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    nearest = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = parts.abs() * 64 / blocks.float().unsqueeze(-1)
    made = rounded(x, NVFP4_ACT, scale).view(40, 16, 16)
    codes = made.abs() * 64 / blocks.float().unsqueeze(-1)
    distance = (codes - grid).abs()
    best = (grid.unsqueeze(-1) - nearest).abs().amin(-1)
    torch.testing.assert_close(distance, best, rtol=1e-5, atol=1e-5)
    assert codec is not None and torch.equal(made.signbit() | (made == 0), parts.signbit() | (made == 0))


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_any_number_of_tokens_and_experts_without_any(tokens: int) -> None:
    problem = problem_of(SCHEMES["fp8 blocks"])
    prepared, inputs = layer_of(problem), inputs_of(problem, tokens)
    ids = torch.where(inputs.ids == 1, -1, inputs.ids)
    y = apply(RUNNER, prepared, inputs.x, ids, inputs.weights)
    assert y.shape == inputs.x.shape and y.isfinite().all()


def test_one_scale_for_everything_is_that_of_the_largest_token() -> None:
    problem = problem_of(SCHEMES["fp8 one scale made at run time"])
    prepared, inputs = layer_of(problem), inputs_of(problem)
    x = inputs.x.clone()
    # Where E4M3 ends below, a small token is lost beside one that is 2**20 times as large.
    x[0] *= 2.0**10
    x[1] *= 2.0**-14
    y = apply(RUNNER, prepared, x, inputs.ids, inputs.weights)
    assert not y[1].any()


def test_a_layout_without_the_scales_of_activations_is_refused() -> None:
    problem = problem_of(SCHEMES["fp8 static"])
    prepared, inputs = layer_of(problem), inputs_of(problem)
    lacking = {k: t for k, t in prepared.weights.items() if not k.endswith("_input")}
    kept = replace(prepared, weights=lacking)
    apply(RUNNER, kept, inputs.x, inputs.ids, inputs.weights)  # decoded experts have them still
    bare = replace(kept, dense=lambda ids: replace(prepared.dense(ids), w13_input=None, w2_input=None))
    with pytest.raises(NoBackend, match="scales of activations, which weights in canonical lack"):
        apply(RUNNER, bare, inputs.x, inputs.ids, inputs.weights)


def test_static_scales_are_each_experts_own_and_the_larger_of_its_halves() -> None:
    problem = problem_of(SCHEMES["fp8 static"])
    prepared, inputs = layer_of(problem), inputs_of(problem)
    changed = dict(prepared.weights)
    changed["w13_input"] = prepared.weights["w13_input"].clone()
    changed["w13_input"][2, 1] = 2.0**20
    y = apply(RUNNER, prepared, inputs.x, inputs.ids, inputs.weights)
    other = apply(RUNNER, replace(prepared, weights=changed), inputs.x, inputs.ids, inputs.weights)
    hit = (inputs.ids == 2).any(1)
    assert torch.equal(y[~hit], other[~hit]) and not torch.equal(y[hit], other[hit])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": Activation("silu", gated=False)}, ""),
        ({"activation": Activation("softplus")}, "activation softplus"),
        ({"scheme": Scheme(BF16, ActFormat("int4", 4, (1, 32)))}, "there are quantizers to"),
        ({"dims": Dims(256, 96), "scheme": Scheme(FP8_CHANNEL, BY_128)}, "96 columns are no whole number"),
    ],
)
def test_refuses_with_the_reason(change: dict[str, object], reason: str) -> None:
    said = RUNNER.refusal(replace(problem_of(Scheme(BF16)), **change), torch.device("cpu"))  # type: ignore[arg-type]
    assert reason in said if reason else not said


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_what_is_quantized_has_a_tolerance(name: str) -> None:
    number = NUMBER_FORMATS[name]
    assert (refusal(act_format(name, (1, 32)), 64) == "") == (number.token_tolerance is not None)


def test_experts_are_decoded_as_stored() -> None:
    prepared = layer_of(problem_of(SCHEMES["nvfp4"]))
    assert isinstance(prepared.expert(0), DenseExpert)
