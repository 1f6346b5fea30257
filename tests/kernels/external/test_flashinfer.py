"""FlashInfer's arguments: bound to its signatures, put through its checks, read by its own references."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moectl.capabilities.flashinfer import (
    CUTLASS,
    GATED,
    LLAMA4,
    METHODS,
    TRTLLM,
    UNGATED,
    FlashInferKernel,
    method_of,
    refusal,
    unrouted,
)
from moectl.errors import BackendFailed, NoBackend
from moectl.kernels.layer_inputs import LayerInputs, make_inputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.quantize_tokens import QuantizedTokens, quantize
from moectl.kernels.registry import RUNNERS, runner_for
from moectl.kernels.tolerance import check, tolerance_for
from moectl.layer.experts import Ids
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import (
    A16,
    BF16,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    Scheme,
    int_format,
)
from support.runners import apply

pytest.importorskip("flashinfer")
from flashinfer import fused_moe
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.fused_moe import core, runners
from flashinfer.fused_moe.api import QuantFormat
from flashinfer.tllm_enums import ActivationType, RoutingMethodType
from flashinfer.trace.templates import moe as references

from moectl.kernels.external import flashinfer_common, flashinfer_cutlass, flashinfer_trtllm

STEP = Activation("swiglustep", limit=1.5)
DEFAULT = Routing(renormalize=False)
KERNELS = {f"{kernel.layout} {kernel.act}": kernel for kernel in TRTLLM}
CUTLASS_KERNELS = {kernel.layout: kernel for kernel in CUTLASS}


def problem_of(
    kernel: FlashInferKernel, activation: Activation = SILU, routing: Routing = DEFAULT
) -> MoEProblem:
    return MoEProblem(
        Dims(512, 256),
        experts=8,
        top_k=2,
        scheme=Scheme(kernel.weight, kernel.act),
        activation=activation,
        routing=routing,
        bias=kernel.bias,
    )


@dataclass(frozen=True)
class OneScale(RandomLayer):
    """A random layer whose gate and up share the scale that a layout holds for both."""

    def canonical(self, ids: Ids, device: torch.device | None = None) -> dict[str, Tensor]:
        drawn = super().canonical(ids, device)
        if self.problem.scheme.weight == FP8_TENSOR:
            drawn["w13_scale"].copy_(drawn["w13_scale"][:, :1].expand_as(drawn["w13_scale"]))
        return drawn


def layer_of(problem: MoEProblem, backend: str) -> PreparedMoE:
    return OneScale(problem, torch.device("cpu")).experts.prepared(backend, "cpu")


def tokens_of(prepared: PreparedMoE, x: Tensor) -> Tensor | QuantizedTokens:
    """Tokens as the kernel framework hands them to the backend."""
    runner = runner_for(prepared.backend)
    wants = runner.wants_of(prepared.problem)
    return x if wants == A16 else quantize(x, wants, runner.input_scale(prepared))


def inputs_of(problem: MoEProblem, tokens: int = 5) -> LayerInputs:
    return make_inputs(problem, tokens, seed=90001)


def arguments_of(prepared: PreparedMoE, inputs: LayerInputs, logits: bool) -> tuple[str, dict[str, Any]]:
    kernel = flashinfer_trtllm.kernel_for(prepared.problem, prepared.backend)
    assert kernel is not None
    x = tokens_of(prepared, inputs.x)
    if logits:
        return kernel.logits, flashinfer_trtllm.logits_arguments(prepared, x, inputs.logits, None)
    return kernel.routed, flashinfer_trtllm.routed_arguments(prepared, x, inputs.ids, inputs.weights)


def _name(logits: bool, prefix: str = "flashinfer_trtllm") -> str:
    return f"{prefix}_monolithic" if logits else prefix


@pytest.mark.parametrize("logits", [False, True], ids=["routed", "logits"])
@pytest.mark.parametrize("name", KERNELS)
def test_arguments_bind_and_pass_flashinfers_checks(
    name: str, logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(KERNELS[name])
    prepared, inputs = layer_of(problem, _name(logits)), inputs_of(problem)
    function, arguments = arguments_of(prepared, inputs, logits)
    inspect.signature(getattr(fused_moe, function)).bind(**arguments)
    called: list[tuple[Any, ...]] = []

    def operator(*given: Any) -> list[Tensor]:
        called.append(given)
        return [torch.full((len(inputs.x), 512), 7.0, dtype=torch.bfloat16)]

    module = SimpleNamespace(**dict.fromkeys(_operators(), operator))
    monkeypatch.setattr(core, "get_trtllm_moe_sm100_module", lambda: module)
    y = flashinfer_common.call(prepared.backend, function, arguments, 512)
    assert called and y.shape == inputs.x.shape and (y == 7).all()


def _operators() -> set[str]:
    """What FlashInfer's compiled module holds: every function of a row, and what routed ones call."""
    names = {name for kernel in TRTLLM for name in (kernel.routed, kernel.logits)}
    return names | {name.replace("routed_moe", "moe") for name in names}


FP4_PAIRS = {
    "trtllm-mxfp4 a16": (QuantFormat.MXFP4, QuantFormat.BF16),
    "trtllm-mxfp4 mxfp8 dynamic": (QuantFormat.MXFP4, QuantFormat.MXFP8),
    "trtllm-nvfp4 nvfp4 dynamic": (QuantFormat.NVFP4, QuantFormat.NVFP4),
}


def _self(pair: object, intermediate: int = 256, experts: int = 8, gated: bool = True) -> Any:
    return SimpleNamespace(
        _pair=pair,
        _num_weight_rows=experts,
        _num_local_experts=experts,
        _intermediate_size=intermediate,
        device=torch.device("cpu"),
        config=SimpleNamespace(
            activation=SimpleNamespace(is_gated=gated),
            routing=SimpleNamespace(num_experts=experts),
            experts=SimpleNamespace(intermediate_size=intermediate),
        ),
    )


def _act(arguments: dict[str, Any]) -> Any:
    return SimpleNamespace(
        hidden_states_q=arguments["hidden_states"], hidden_states_scale=arguments.get("hidden_states_scale")
    )


@pytest.mark.parametrize("name", FP4_PAIRS)
def test_fp4_tensors_have_the_shapes_and_dtypes_that_flashinfer_checks(name: str) -> None:
    problem = problem_of(KERNELS[name])
    prepared = layer_of(problem, "flashinfer_trtllm")
    _, arguments = arguments_of(prepared, inputs_of(problem), logits=False)
    check_fp4 = runners._TrtllmRunnerBase._validate_fp4_tensors
    check_fp4(_self(FP4_PAIRS[name]), _act(arguments), arguments, 512)
    with pytest.raises((ValueError, TypeError)):
        check_fp4(_self(FP4_PAIRS[name]), _act(arguments), arguments, 544)


def test_fp8_tensors_have_the_shapes_and_dtypes_that_flashinfer_checks() -> None:
    problem = problem_of(KERNELS["trtllm-mxfp8 mxfp8 dynamic"])
    prepared = layer_of(problem, "flashinfer_trtllm")
    _, arguments = arguments_of(prepared, inputs_of(problem), logits=False)
    pair = (QuantFormat.MXFP8, QuantFormat.MXFP8)
    runners.TrtllmFp8BlockRunner._validate_fp8_tensors(_self(pair), _act(arguments), arguments, 512)
    problem = problem_of(KERNELS["trtllm-fp8-tensor fp8 static"])
    prepared = layer_of(problem, "flashinfer_trtllm")
    _, arguments = arguments_of(prepared, inputs_of(problem), logits=False)
    runners.TrtllmFp8PerTensorRunner._validate_tensors(_self(None), _act(arguments), arguments, 512)


CUTLASS_CHECKS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cutlass-sm90": (runners.CutlassW4A16Runner, ("fc1_expert_scales", "fc2_expert_scales")),
    "cutlass-bf16": (runners.CutlassBf16Runner, ()),
    "cutlass-fp8-block": (runners.CutlassFp8BlockRunner, ("fc1_block_scale", "fc2_block_scale")),
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("layout", CUTLASS_KERNELS)
def test_cutlass_arguments_bind_and_pass_flashinfers_checks(layout: str, gated: bool) -> None:
    kernel = CUTLASS_KERNELS[layout]
    problem = problem_of(kernel, SILU if gated else Activation("relu2", gated=False))
    if refusal(kernel, problem):
        assert not gated and not kernel.ungated
        return
    prepared, inputs = layer_of(problem, "flashinfer_cutlass"), inputs_of(problem)
    arguments = flashinfer_cutlass.arguments(prepared, inputs.x, inputs.ids, inputs.weights)
    inspect.signature(fused_moe.cutlass_fused_moe).bind(**arguments)
    runner, scales = CUTLASS_CHECKS[layout]
    names = ("fc1_expert_weights", "fc2_expert_weights", *scales)
    view = dict(zip(names, [*(arguments[n] for n in names[:2]), *arguments["quant_scales"]], strict=True))
    me = _self(None, gated=gated)
    me._required_weight_keys = runner._required_weight_keys
    me._validate_weight_storage = lambda tensors: runner._validate_weight_storage(me, tensors)
    assert set(names) == set(runner._required_weight_keys)
    runner._pack_weight_inputs(me, view, 512)
    with pytest.raises((ValueError, TypeError)):
        runner._pack_weight_inputs(me, view, 640)


def test_tactics_are_searched_once_for_each_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(CUTLASS_KERNELS["cutlass-sm90"])
    prepared = layer_of(problem, "flashinfer_cutlass")
    entered: list[tuple[int, bool, tuple[int, ...] | None]] = []

    def run(**arguments: Any) -> list[Tensor]:
        tuner = AutoTuner.get()
        entered.append((len(arguments["input"]), tuner.is_tuning_mode, tuner._override_tuning_buckets))
        return [arguments["input"]]

    monkeypatch.setattr(flashinfer_common, "function", lambda name: run)
    compute = runner_for("flashinfer_cutlass").compute
    assert compute is not None
    for tokens in (1, 5, 7, 8, 1):
        inputs = inputs_of(problem, tokens)
        compute(prepared, inputs.x, inputs.ids, inputs.weights)
    assert entered == [(1, True, (1,)), (5, True, (4,)), (7, False, (4,)), (8, True, (8,)), (1, False, (1,))]
    assert not AutoTuner.get().is_tuning_mode


def test_the_tuner_is_as_before_when_the_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(CUTLASS_KERNELS["cutlass-sm90"])
    prepared = layer_of(problem, "flashinfer_cutlass")
    tuner, modes, fails = AutoTuner.get(), [], [True]
    compute = runner_for("flashinfer_cutlass").compute
    assert compute is not None

    def run(**arguments: Any) -> list[Tensor]:
        modes.append(tuner.is_tuning_mode)
        if fails:
            raise RuntimeError("no tactic works")
        return [arguments["input"]]

    monkeypatch.setattr(flashinfer_common, "function", lambda name: run)
    inputs = inputs_of(problem, 4)
    call = partial(compute, prepared, inputs.x, inputs.ids, inputs.weights)
    with pytest.raises(BackendFailed, match="no tactic works"):
        call()
    assert not tuner.is_tuning_mode and tuner._override_tuning_buckets is None
    fails.clear()
    call()  # it had found nothing, and searches again
    with autotune(True, tuning_buckets=(3,)):
        call()
        assert tuner.is_tuning_mode and tuner._override_tuning_buckets == (3,)
    call()
    assert modes == [True, True, True, False] and not tuner.is_tuning_mode


REFERENCES: dict[str, tuple[Any, Any]] = {
    "trtllm-bf16 a16": (
        references._trtllm_bf16_routed_moe_reference,
        references._trtllm_bf16_moe_reference,
    ),
    "trtllm-nvfp4 nvfp4 dynamic": (
        references._trtllm_fp4_block_scale_routed_moe_reference,
        references._trtllm_fp4_block_scale_moe_default_routing_reference,
    ),
    "trtllm-mxfp8 mxfp8 dynamic": (
        references._trtllm_fp8_block_scale_routed_moe_reference,
        references._trtllm_fp8_block_scale_moe_default_routing_reference,
    ),
    "trtllm-fp8-tensor fp8 static": (
        references._trtllm_fp8_per_tensor_scale_routed_moe_reference,
        references._trtllm_fp8_per_tensor_scale_moe_reference,
    ),
}
"""FlashInfer's own references that undo its layouts, for expert ids and for logits."""


def _called(reference: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
    known = inspect.signature(reference).parameters
    passes = any(p.kind is p.VAR_KEYWORD for p in known.values())
    return reference(**{k: v for k, v in arguments.items() if passes or k in known})


@pytest.mark.parametrize("logits", [False, True], ids=["routed", "logits"])
@pytest.mark.parametrize("name", REFERENCES)
def test_flashinfers_references_read_the_layer_as_it_is(name: str, logits: bool) -> None:
    problem = problem_of(KERNELS[name], STEP)
    prepared, inputs = layer_of(problem, _name(logits)), inputs_of(problem, 9)
    _, arguments = arguments_of(prepared, inputs, logits)
    if not logits and name.startswith("trtllm-fp8-tensor"):
        # This one reads ids and weights in one tensor only, as the kernel can, too.
        arguments["topk_ids"] = flashinfer_trtllm.pack_topk(*arguments["topk_ids"])
    y = _called(REFERENCES[name][logits], arguments)
    twin = replace(prepared, backend="emulation")
    expected = apply(runner_for("emulation"), twin, inputs.x, inputs.ids, inputs.weights)
    # What enters the second GEMM is not rounded in FlashInfer's references.
    result = check(y, expected.float(), tolerance_for(problem, "declared"))
    assert result.ok, result


def test_padded_layers_get_wider_tokens_and_narrower_results(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(problem_of(KERNELS["trtllm-mxfp4 mxfp8 dynamic"], SWIGLU_OAI), dims=Dims(288, 160))
    prepared, inputs = layer_of(problem, "flashinfer_trtllm"), inputs_of(problem)
    name, arguments = arguments_of(prepared, inputs, logits=False)
    assert arguments["hidden_states"].shape == (5, 512) and arguments["intermediate_size"] == 256
    assert not arguments["hidden_states"][:, 288:].float().any()
    assert arguments["hidden_states_scale"].shape == (5, 16)
    made = torch.arange(5 * 512.0).view(5, 512)
    monkeypatch.setattr(flashinfer_common, "function", lambda name: lambda **kwargs: [made])
    assert torch.equal(flashinfer_common.call("flashinfer_trtllm", name, arguments, 288), made[:, :288])


def test_mxfp4_takes_fp8_tokens_only_when_asked() -> None:
    problem = problem_of(KERNELS["trtllm-mxfp4 a16"])
    for logits in (False, True):
        wide, narrow = (runner_for(_name(logits, f"flashinfer_trtllm{tail}")) for tail in ("", "_afp8"))
        assert wide.wants_of(problem) == A16 and narrow.wants_of(problem) == MXFP8_ACT
        assert tolerance_for(problem, narrow.accumulation).rms > tolerance_for(problem).rms
        assert narrow.layout_of(problem) == wide.layout_of(problem) == "trtllm-mxfp4"
    assert flashinfer_trtllm.problem_refusal(
        problem_of(KERNELS["trtllm-bf16 a16"]), "flashinfer_trtllm_afp8", False
    )


@pytest.mark.parametrize("form", ["swigluoai", "situ", "silu with a limit", "relu2"])
def test_activation_numbers_reach_both_libraries(form: str) -> None:
    activation = {
        "swigluoai": SWIGLU_OAI,
        "situ": Activation("situ", beta=4.0, linear_beta=25.0),
        "silu with a limit": Activation("silu", limit=7.0),
        "relu2": Activation("relu2", gated=False),
    }[form]
    wanted = {
        "swigluoai": (1.702, 1.0, 7.0),
        "situ": (4.0, 25.0, None),
        "silu with a limit": (None, None, 7.0),
    }
    numbers = wanted.get(form, (None, None, None))
    problem = problem_of(CUTLASS_KERNELS["cutlass-bf16"], activation)
    made = flashinfer_cutlass.layer_arguments(layer_of(problem, "flashinfer_cutlass"))
    names = ("situ_beta", "situ_linear_beta", "swiglu_limit")
    if form != "situ":
        names = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
    for name, number in zip(names, numbers, strict=True):
        assert made[name] is None if number is None else (made[name] == number).all(), name
    kernel = KERNELS["trtllm-nvfp4 nvfp4 dynamic"]
    prepared = layer_of(problem_of(kernel, activation), "flashinfer_trtllm")
    made = flashinfer_trtllm.WEIGHTS["trtllm-nvfp4"](prepared)
    gate = made["output1_scale_gate_scalar"]
    raw = torch.ones_like(gate) if form == "situ" else gate
    folded = (numbers[0], *(None if n is None else n / raw for n in numbers[1:]))
    for name, number in zip(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"), folded, strict=True):
        given = made[name]
        if number is None:
            assert given is None, name
        else:
            torch.testing.assert_close(given, torch.as_tensor(number).expand_as(given))
    inner = 1 / prepared.weights["w2_input"][0]
    product = activation.gated and form != "situ"
    torch.testing.assert_close(
        made["output1_scale_scalar"], (gate if product else torch.ones_like(gate)) * inner
    )


ROUTINGS: dict[str, tuple[Routing, str]] = {
    "softmax": (Routing(renormalize=False), "Default"),
    "qwen": (Routing(), "RenormalizeNaive"),
    "gpt-oss": (Routing(after_topk=True), "Renormalize"),
    "sigmoid": (Routing("sigmoid", renormalize=False), "Sigmoid"),
    "sigmoid renormalized": (Routing("sigmoid"), "SigmoidRenorm"),
    "deepseek": (
        Routing("sigmoid", correction_bias=True, groups=4, topk_groups=2, scale=2.5),
        "DeepSeekV3",
    ),
    "kimi": (Routing("sigmoid", correction_bias=True, scale=2.8), "DeepSeekV3"),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_named_as_flashinfer_names_it(name: str) -> None:
    routing, member = ROUTINGS[name]
    problem = problem_of(KERNELS["trtllm-bf16 a16"], routing=routing)
    assert not unrouted(problem)
    prepared, inputs = layer_of(problem, "flashinfer_trtllm_monolithic"), inputs_of(problem)
    bias = torch.randn(8) if routing.correction_bias else None
    made = flashinfer_trtllm.logits_arguments(prepared, inputs.x, inputs.logits, bias)
    assert made["routing_method_type"] == RoutingMethodType[member]
    assert made["n_group"] == routing.groups and made["topk_group"] == routing.topk_groups
    assert made["routed_scaling_factor"] == (routing.scale if routing.correction_bias else None)
    assert made["routing_logits"].dtype == torch.float32


def test_every_name_is_one_of_flashinfers() -> None:
    for function in (*GATED.values(), *UNGATED.values()):
        assert ActivationType[function.member].is_gated == (function in GATED.values())
    for method in (*METHODS.values(), LLAMA4):
        assert method.member in RoutingMethodType.__members__
    for kernel in (*TRTLLM, *CUTLASS):
        for name in (kernel.routed, kernel.logits):
            assert not name or callable(getattr(fused_moe, name))


def _of(layout: str, **change: Any) -> MoEProblem:
    kernel = {kernel.layout: kernel for kernel in (*TRTLLM, *CUTLASS)}[layout]
    return replace(problem_of(kernel), **change)


@pytest.mark.parametrize(
    ("problem", "logits", "reason"),
    [
        (_of("trtllm-bf16", activation=Activation("gelu")), False, "for gated experts of bf16"),
        (_of("trtllm-bf16", bias=True), False, "add no biases"),
        (_of("trtllm-bf16", dtype="fp16"), False, "for bf16 models"),
        (_of("trtllm-fp8-block", dims=Dims(500, 256)), False, "takes multiples of 128 and 128"),
        (_of("trtllm-mxfp4", activation=Activation("situ", beta=1.0)), False, "needs beta"),
        (_of("trtllm-bf16", activation=Activation("swiglustep")), False, "needs limit"),
        (_of("trtllm-fp8-tensor", activation=SWIGLU_OAI), False, "it has silu, swiglustep"),
        (_of("trtllm-fp8-tensor", activation=Activation("silu", limit=7.0)), False, "do not reach"),
        (_of("trtllm-bf16", experts=4096), False, "at most 2048 experts"),
        (_of("trtllm-bf16", routing=Routing("sigmoid", weight_on_input=True)), False, "top-1"),
        (_of("trtllm-bf16", routing=Routing("sqrtsoftplus")), True, "no routing method"),
        (_of("trtllm-bf16", routing=Routing(hashed=True)), True, "no routing method"),
        (_of("trtllm-bf16", routing=Routing(expert_scale=True)), True, "no routing method"),
        (_of("trtllm-bf16", routing=Routing(scale=2.0)), True, "no factor on the weights"),
        (_of("trtllm-bf16", routing=Routing(groups=4, topk_groups=2)), True, "no groups"),
        (_of("trtllm-bf16", top_k=23, experts=32, routing=ROUTINGS["kimi"][0]), True, "at most 22"),
        (_of("trtllm-bf16", top_k=1, routing=Routing("sigmoid", weight_on_input=True)), True, "not reach"),
        (_of("trtllm-bf16", scheme=Scheme(int_format(8, 32))), False, "it has kernels for"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(problem: MoEProblem, logits: bool, reason: str) -> None:
    assert reason in flashinfer_trtllm.problem_refusal(problem, _name(logits), logits)


def test_weights_on_the_input_are_multiplied_beforehand() -> None:
    routing = Routing("sigmoid", weight_on_input=True)
    problem = replace(problem_of(CUTLASS_KERNELS["cutlass-bf16"], routing=routing), top_k=1)
    prepared, inputs = layer_of(problem, "flashinfer_cutlass"), inputs_of(problem)
    made = flashinfer_cutlass.arguments(prepared, inputs.x, inputs.ids, inputs.weights)
    assert (made["token_final_scales"] == 1).all()
    assert torch.equal(made["input"], (inputs.x.float() * inputs.weights).bfloat16())
    llama = replace(problem_of(KERNELS["trtllm-fp8-tensor fp8 static"], routing=routing), top_k=1)
    prepared = layer_of(llama, "flashinfer_trtllm_monolithic")
    _, arguments = arguments_of(prepared, inputs_of(llama), logits=True)
    assert arguments["use_routing_scales_on_input"]
    assert arguments["routing_method_type"] == RoutingMethodType.Llama4
    prepared = layer_of(llama, "flashinfer_trtllm")
    _, arguments = arguments_of(prepared, inputs_of(llama), logits=False)
    assert not arguments["use_routing_scales_on_input"]


def test_ids_are_the_layers_and_skipped_ones_stay_so() -> None:
    problem = problem_of(KERNELS["trtllm-mxfp4 a16"])
    prepared = replace(layer_of(problem, "flashinfer_trtllm"), first_expert=3)
    ids = torch.tensor([[0, -1], [4, 2], [8, 1]], dtype=torch.int32)
    x, weights = torch.zeros(3, 512, dtype=torch.bfloat16), torch.rand(3, 2)
    made = flashinfer_trtllm.routed_arguments(prepared, x, ids, weights)
    assert made["topk_ids"][0].tolist() == [[3, -1], [7, 5], [-1, 4]] and made["local_expert_offset"] == 3
    packed = flashinfer_trtllm.pack_topk(*made["topk_ids"])
    read, factors = references._step_decode_precomputed_routing(packed)
    assert torch.equal(read, made["topk_ids"][0].long())
    assert torch.equal(factors, weights.bfloat16().float())


@pytest.mark.parametrize(
    "error", [RuntimeError("no kernel image\nis available"), TypeError("bad"), ValueError()]
)
def test_a_failure_names_the_backend_and_what_was_said(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(**kwargs: object) -> None:
        raise error

    monkeypatch.setattr(flashinfer_common, "function", lambda name: breaks)
    with pytest.raises(
        BackendFailed, match="the flashinfer_cutlass backend failed: cutlass_fused_moe: "
    ) as got:
        flashinfer_common.call("flashinfer_cutlass", "cutlass_fused_moe", {}, 8)
    assert got.value.why.endswith(str(error).splitlines()[-1] if str(error) else "ValueError")


def test_without_flashinfer_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_common, "FUSED_MOE", "flashinfer_that_is_nowhere")
    with pytest.raises(NoBackend, match="pip install flashinfer-python"):
        flashinfer_common.function.__wrapped__("cutlass_fused_moe")
    with pytest.raises(NoBackend, match=r"has no ActivationType\.Nothing"):
        flashinfer_common.member.__wrapped__("ActivationType", "Nothing")


def test_on_this_machine_every_one_says_why_not() -> None:
    cpu = torch.device("cpu")
    for name in RUNNERS:
        if name.startswith("flashinfer"):
            assert "needs a CUDA GPU" in runner_for(name).refusal(_of("trtllm-bf16"), cpu)


def test_formats_outside_the_tables_are_refused_when_a_layer_is_laid_out() -> None:
    problem = _of("trtllm-bf16", scheme=Scheme(int_format(8, 32)))
    for name in ("flashinfer_cutlass", "flashinfer_trtllm"):
        with pytest.raises(NoBackend, match="int8 group 32"):
            layer_of(problem, name)
    assert method_of(Routing("sparsemixer")) is None
    assert {BF16, FP8_TENSOR, MXFP4, MXFP8, NVFP4} <= {kernel.weight for kernel in TRTLLM}


@pytest.mark.parametrize("name", [name for name in RUNNERS if name.startswith("flashinfer")])
def test_every_format_can_be_asked_for_its_layout(name: str) -> None:
    """As where a converted folder looks for the backend that reads it."""
    for kernel in (*TRTLLM, *CUTLASS):
        for act in (A16, MXFP8_ACT):
            problem = _of("trtllm-bf16", scheme=Scheme(kernel.weight, act))
            assert isinstance(runner_for(name).layout_of(problem), str)
            assert runner_for(name).wants_of(problem) is not None
