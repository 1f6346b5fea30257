"""Rules that no recorded decision asks for: adapters, batch invariance, Llama 4, odd machines, plug-ins."""

from dataclasses import replace

import pytest

from moectl.environment import Packages, find_device
from moectl.oracle import Decision, OutOfScope, policy_named, select
from moectl.oracle.machine_packages import packages_from
from moectl.problem.moe_problem import SWIGLU_OAI, Activation, Dims, MoEProblem, Parallel, Routing
from moectl.problem.schemes import FULL, MXFP4, ActFormat, Scheme, WeightFormat, int_format

VLLM = policy_named("vllm-0.33.0")
FULL_INSTALL = packages_from("full")

TENSOR = (FULL, FULL)
BF16 = Scheme(WeightFormat("bf16", 16))
BLOCK = Scheme(WeightFormat("fp8", 8, (128, 128)), ActFormat("fp8", 8, (1, 128)))
STATIC = Scheme(WeightFormat("fp8", 8, TENSOR), ActFormat("fp8", 8, TENSOR, dynamic=False))
DYNAMIC = Scheme(WeightFormat("fp8", 8, TENSOR), ActFormat("fp8", 8, TENSOR))
CHANNEL = Scheme(WeightFormat("fp8", 8, (1, FULL)), ActFormat("fp8", 8, (1, FULL)))
W8A8 = Scheme(int_format(8, FULL), ActFormat("int8", 8, (1, FULL)))
W4A8 = Scheme(int_format(4, 128), ActFormat("fp8", 8, (1, FULL)))
W4A8_INT = Scheme(int_format(4, 32), ActFormat("int8", 8, (1, FULL)))

QWEN = MoEProblem(Dims(2048, 768), 128, 8, BF16)
FP8 = replace(QWEN, scheme=BLOCK, storage="fp8")
COMPRESSED = replace(FP8, scheme=CHANNEL, storage="compressed-tensors")
RELU2 = Activation("relu2", gated=False)
LLAMA4 = Routing("sigmoid", renormalize=False, weight_on_input=True)
EP8 = Parallel(dp=8, ep=True)


def ask(
    problem: MoEProblem, gpu: str, packages: Packages = FULL_INSTALL, only: str | None = None
) -> Decision:
    return select(problem, find_device(gpu), packages, VLLM, only)


def env(packages: Packages = FULL_INSTALL, **switches: str) -> Packages:
    return replace(packages, env={**packages.env, **switches})


ROCM = packages_from("rocm_default")
ZEN = Packages({"zentorch": ""})
INVARIANT = env(VLLM_BATCH_INVARIANT="1")


@pytest.mark.parametrize(
    ("problem", "gpu", "packages", "experts"),
    [
        # Ungated experts
        (replace(QWEN, activation=RELU2), "h100", FULL_INSTALL, "TritonExperts"),
        (replace(QWEN, activation=RELU2), "b200", FULL_INSTALL, "TrtLlmBf16ExpertsMonolithic"),
        (replace(FP8, activation=RELU2, scheme=STATIC), "h100", FULL_INSTALL, "FlashInferExperts"),
        (replace(COMPRESSED, activation=RELU2), "h100", FULL_INSTALL, "TritonExperts"),
        (replace(QWEN, activation=RELU2), "mi300x", env(ROCM, VLLM_ROCM_USE_AITER="1"), "TritonExperts"),
        (replace(QWEN, activation=RELU2), "cpu", Packages(), None),
        # A clamp on plain SiLU
        (replace(FP8, activation=Activation("silu", limit=7.0)), "b200", FULL_INSTALL, "TrtLlmFp8Experts"),
        (
            replace(FP8, scheme=STATIC, activation=Activation("silu", limit=7.0)),
            "b200",
            FULL_INSTALL,
            "FlashInferExperts",
        ),
        # Adapters
        (replace(QWEN, lora=True), "h100", FULL_INSTALL, "TritonExperts"),
        (replace(QWEN, lora=True), "b200", FULL_INSTALL, "TrtLlmBf16LoRAExperts"),
        (replace(QWEN, lora=True, dims=Dims(2048, 192)), "b200", FULL_INSTALL, "TritonExperts"),
        (replace(FP8, lora=True), "b200", FULL_INSTALL, "TritonExperts"),
        (replace(FP8, lora=True), "a100", FULL_INSTALL, "MarlinExperts"),
        (replace(COMPRESSED, scheme=W4A8, lora=True, dims=Dims(2048, 768)), "h100", FULL_INSTALL, None),
        # Batch invariance
        (QWEN, "b200", INVARIANT, "TritonExperts"),
        (FP8, "b200", INVARIANT, "TritonExperts"),
        (FP8, "a100", INVARIANT, "HummingIndexedExperts"),
        (replace(FP8, scheme=DYNAMIC), "h100", INVARIANT, "TritonExperts"),
        (QWEN, "xpu", env(Packages(), VLLM_BATCH_INVARIANT="1"), "TritonExperts"),
        # Llama 4
        (replace(QWEN, routing=LLAMA4, top_k=1), "b200", FULL_INSTALL, "TrtLlmBf16ExpertsMonolithic"),
        (
            replace(FP8, scheme=STATIC, storage="modelopt", routing=LLAMA4, top_k=1),
            "b200",
            FULL_INSTALL,
            "TrtLlmFp8ExpertsMonolithic",
        ),
        (replace(FP8, routing=LLAMA4, top_k=1), "b200", FULL_INSTALL, "TrtLlmFp8ExpertsModular"),
        # Routers
        (replace(FP8, routing=Routing(hashed=True)), "b200", FULL_INSTALL, "TrtLlmFp8ExpertsModular"),
        (replace(FP8, dtype="fp16"), "b200", FULL_INSTALL, "TrtLlmFp8ExpertsModular"),
        (
            replace(FP8, dtype="fp16", router_dtype="fp32"),
            "b200",
            FULL_INSTALL,
            "TrtLlmFp8ExpertsMonolithic",
        ),
        # Sizes and experts
        (replace(QWEN, experts=2304), "b200", FULL_INSTALL, "FlashInferExperts"),
        (replace(QWEN, experts=1024), "h100", FULL_INSTALL, "FlashInferExperts"),
        # AMD's other architectures
        (FP8, "gfx1201", ROCM, "TritonExperts"),
        (FP8, "gfx1201", env(ROCM, VLLM_ROCM_USE_AITER="1"), "TritonExperts"),
        (FP8, "gfx1100", ROCM, "TritonExperts"),
        (FP8, "gfx90a", ROCM, "TritonExperts"),
        (QWEN, "gfx1100", env(ROCM, VLLM_ROCM_USE_AITER="1"), "TritonExperts"),
        # CPUs
        (QWEN, "cpu-arm", Packages(), "ArmCPUUnquantizedExperts"),
        (QWEN, "cpu-power", Packages(), "PowerCPUUnquantizedExperts"),
        (replace(QWEN, dims=Dims(2064, 768)), "cpu-power", Packages(), "PowerCPUUnquantizedExperts"),
        (replace(QWEN, dims=Dims(2064, 768)), "cpu-arm", Packages(), None),
        (replace(QWEN, dims=Dims(2064, 768)), "cpu-zen", ZEN, "CPUUnquantizedExperts"),
        (replace(QWEN, dims=Dims(2064, 768)), "cpu-zen", Packages(), None),
        (replace(QWEN, dims=Dims(2048, 750)), "cpu", Packages(), "CPUUnquantizedExperts"),
        (
            replace(QWEN, dims=Dims(2880, 750), activation=SWIGLU_OAI, rows="interleaved"),
            "cpu",
            Packages(),
            None,
        ),
        (FP8, "cpu-amx-fp8", Packages(), "CPUExpertsFp8W8A8"),
        (replace(COMPRESSED, scheme=W8A8), "cpu-zen", ZEN, "ZenCPUExpertsInt8"),
        (replace(COMPRESSED, scheme=W8A8), "cpu-power", Packages(), "PowerCPUExpertsInt8"),
        (replace(COMPRESSED, scheme=W8A8), "cpu-arm", Packages(), "ArmCPUExpertsInt8"),
        (replace(COMPRESSED, scheme=W8A8, dims=Dims(2048, 760)), "cpu-arm", Packages(), None),
        (replace(COMPRESSED, scheme=W8A8, parallel=Parallel(tp=2, ep=True)), "cpu-arm", Packages(), None),
        (replace(COMPRESSED, scheme=W4A8_INT), "cpu-arm", Packages(), "CPUExpertsInt4"),
        (replace(COMPRESSED, scheme=W4A8_INT), "h100", FULL_INSTALL, None),
        # Exchanges
        (replace(QWEN, parallel=replace(EP8, all2all="moonep")), "h100", FULL_INSTALL, "MoonEPExperts"),
        (replace(FP8, parallel=replace(EP8, all2all="deepep_v2")), "b200", FULL_INSTALL, "TrtLlmFp8Experts"),
        (replace(FP8, parallel=replace(EP8, all2all="nixl_ep")), "h100", FULL_INSTALL, "BatchedDeepGemm"),
        # Other checkpoints
        (
            replace(FP8, scheme=replace(BLOCK, weight=WeightFormat("fp8", 8, (64, 64)))),
            "h100",
            FULL_INSTALL,
            "TritonExperts",
        ),
        (replace(FP8, storage="quark", scheme=CHANNEL), "mi300x", ROCM, "TritonExperts"),
        (replace(FP8, storage="modelopt"), "h100", FULL_INSTALL, "TritonExperts"),
        (replace(FP8, storage="quark", scheme=W8A8), "h100", FULL_INSTALL, "TritonExperts"),
    ],
)
def test_choices(problem: MoEProblem, gpu: str, packages: Packages, experts: str | None) -> None:
    decision = ask(problem, gpu, packages)
    if experts is None:
        assert decision.chosen is None
        assert decision.error
    else:
        assert decision.chosen is not None, decision.error
        assert decision.chosen.variant.experts.startswith(experts)


def failing(decision: Decision, experts: str) -> set[str]:
    """Questions that an experts class fails."""
    return {v.question for c in decision.candidates if c.variant.experts == experts for v in c.failed}


def test_adapters_do_not_ask_and_ignore_requests() -> None:
    decision = ask(
        replace(QWEN, lora=True, parallel=replace(EP8, all2all="deepep_low_latency")), "h100", only="marlin"
    )
    assert decision.chosen is not None and decision.chosen.assigned
    assert "token format" in failing(decision, "TritonExperts")
    assert any("ignores the request for marlin" in note for note in decision.notes)


def test_gpt_oss_with_adapters() -> None:
    gpt_oss = MoEProblem(
        Dims(2880, 2880),
        32,
        4,
        Scheme(MXFP4),
        SWIGLU_OAI,
        storage="gpt_oss",
        rows="interleaved",
        bias=True,
    )
    adapted = replace(gpt_oss, lora=True)
    assert ask(adapted, "b200").require().variant.experts == "MarlinExperts"
    named = ask(adapted, "b200", only="flashinfer_trtllm").require()
    assert (named.variant.experts, named.engine_name) == (
        "TrtLlmMxfp4LoRAExperts",
        "FLASHINFER_TRTLLM_MXFP4_BF16",
    )
    assert ask(adapted, "b200", only="flashinfer_trtllm_afp8").error_kind == "ValueError"
    experts = [c.variant.experts for c in ask(gpt_oss, "b200", only="flashinfer_trtllm").candidates]
    assert "TrtLlmMxfp4LoRAExperts" not in experts


def test_flydsl_has_a_method_of_its_own() -> None:
    aiter = packages_from("rocm_aiter")
    int4 = replace(QWEN, scheme=Scheme(int_format(4, 32)), storage="compressed-tensors")
    named = ask(int4, "gfx950", aiter, only="flydsl")
    assert named.require().backend.name == "flydsl"
    assert not any("ignores" in note for note in named.notes)
    assert ask(int4, "gfx942", aiter, only="flydsl").error_kind == "ValueError"
    assert ask(replace(int4, lora=True), "gfx950", aiter, only="flydsl").error_kind == "ValueError"
    assert ask(int4, "gfx950", aiter).require().backend.name == "triton"


def test_batch_invariance_on_xpu_is_for_unquantized_models() -> None:
    invariant = env(Packages(), VLLM_BATCH_INVARIANT="1")
    assert ask(QWEN, "xpu", invariant).usable
    assert [gate.kind for gate in ask(FP8, "xpu", invariant).gates] == ["batch invariance"]


@pytest.mark.parametrize(
    ("problem", "gpu", "packages", "kinds"),
    [
        (replace(FP8, parallel=replace(EP8, all2all="moonep")), "h100", FULL_INSTALL, ["token exchange"]),
        (
            replace(QWEN, dtype="fp16", parallel=replace(EP8, all2all="moonep", eplb=True)),
            "h100",
            FULL_INSTALL,
            ["token exchange"] * 2,
        ),
        (replace(QWEN, parallel=replace(EP8, all2all="moonep")), "h100", FULL_INSTALL, []),
        (
            replace(QWEN, parallel=replace(EP8, all2all="mori_high_throughput")),
            "mi300x",
            ROCM,
            ["token exchange"],
        ),
        (
            replace(QWEN, parallel=replace(EP8, all2all="mori_high_throughput")),
            "mi300x",
            env(ROCM, VLLM_ROCM_USE_AITER="1"),
            [],
        ),
        (
            replace(QWEN, parallel=replace(EP8, all2all="mori_high_throughput")),
            "mi300x",
            env(ROCM, VLLM_ROCM_USE_AITER="1", VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS="1"),
            ["token exchange"],
        ),
        (
            replace(
                QWEN,
                activation=Activation("relu2", gated=False),
                parallel=replace(EP8, all2all="mori_low_latency"),
            ),
            "mi300x",
            env(ROCM, VLLM_ROCM_USE_AITER="1"),
            ["token exchange"],
        ),
        (
            QWEN,
            "mi355x",
            env(ROCM, VLLM_ROCM_USE_AITER="1", VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4="1"),
            ["switch"],
        ),
        (QWEN, "mi355x", env(ROCM, VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4="1"), []),
        (
            replace(QWEN, model_type="deepseek_v41"),
            "mi355x",
            env(ROCM, VLLM_ROCM_USE_AITER="1", VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4="1"),
            [],
        ),
        (
            replace(QWEN, experts=60, parallel=replace(EP8, eplb=True)),
            "h100",
            FULL_INSTALL,
            ["expert balancing"],
        ),
        (replace(QWEN, experts=60, parallel=EP8), "h100", FULL_INSTALL, []),
    ],
)
def test_deployments_that_no_method_serves(
    problem: MoEProblem, gpu: str, packages: Packages, kinds: list[str]
) -> None:
    decision = ask(problem, gpu, packages)
    assert [gate.kind for gate in decision.gates] == kinds
    assert decision.usable == (not kinds)


def test_new_questions_have_reasons() -> None:
    assert "batch invariance" in failing(ask(QWEN, "b200", INVARIANT), "TrtLlmBf16ExpertsMonolithic")
    hashed = ask(replace(FP8, routing=Routing(hashed=True)), "b200")
    assert failing(hashed, "TrtLlmFp8ExpertsMonolithic") == {"hash routing"}
    assert "adapters on experts" in failing(ask(replace(FP8, lora=True), "b200"), "TrtLlmFp8ExpertsModular")
    assert failing(ask(replace(FP8, dtype="fp16"), "b200"), "TrtLlmFp8ExpertsMonolithic") == {"router dtype"}


def test_kernels_that_stop_on_llama_4_are_named() -> None:
    llama = replace(
        QWEN, scheme=Scheme(int_format(4, 128)), storage="compressed-tensors", routing=LLAMA4, top_k=1
    )
    decision = ask(llama, "h100")
    assert decision.chosen is not None
    assert decision.chosen.backend.name == "humming"
    assert decision.usable, "the engine's choice does not depend on it"
    assert any("fails on the first token (AssertionError)" in note for note in decision.notes)
    assert not any("first token" in note for note in ask(llama, "a100").notes)


@pytest.mark.parametrize(
    ("switches", "gpu", "backend", "kind"),
    [
        ({"VLLM_USE_DEEP_GEMM": "1"}, "h100", "deep_gemm", ""),
        ({"VLLM_USE_DEEP_GEMM": "1"}, "a100", None, "ValueError"),
        ({"VLLM_MOE_USE_DEEP_GEMM": "0"}, "gb10", "triton", ""),
        ({"VLLM_USE_DEEP_GEMM": "0"}, "gb10", "triton", ""),
        ({}, "gb10", "deep_gemm", ""),
        ({"VLLM_ROCM_USE_AITER": "1"}, "h100", None, "ValueError"),
        ({"VLLM_ROCM_USE_AITER": "0"}, "h100", "triton", ""),
        ({"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "0"}, "h100", "triton", ""),
    ],
)
def test_switches_ask_for_fp8_backends(
    switches: dict[str, str], gpu: str, backend: str | None, kind: str
) -> None:
    decision = ask(FP8, gpu, env(**switches))
    assert (decision.chosen.backend.name if decision.chosen else None) == backend
    assert decision.error_kind == kind


def test_a_switch_that_cannot_be_met_is_ignored_without_quantization() -> None:
    decision = ask(QWEN, "h100", env(VLLM_ROCM_USE_AITER="1"))
    assert decision.chosen is not None
    assert decision.chosen.backend.name == "triton"
    assert decision.candidates[0].backend.name == "aiter"


def test_deep_gemm_is_left_out_for_models_that_it_hurts() -> None:
    qwen35 = replace(FP8, model_type="qwen3_5_moe_text")
    decision = ask(qwen35, "gb10")
    assert decision.chosen is not None
    assert decision.chosen.backend.name == "triton"
    assert "DEEPGEMM" in decision.order
    assert "order" in failing(decision, "TritonOrDeepGemmExperts")
    hopper = ask(replace(qwen35, parallel=replace(EP8, all2all="deepep_low_latency")), "h100").chosen
    assert hopper is not None
    assert hopper.backend.name == "batched_deep_gemm"


@pytest.mark.parametrize(
    ("intermediate", "request_", "experts", "padded", "weight"),
    [
        (96, None, "TritonExperts", 96, "fp8 block 32x32"),
        (192, None, "TritonExperts", 192, "fp8 block 64x64"),
        (96, "triton", "TritonExperts", 96, "fp8 block 32x32"),
        (96, "flashinfer_cutlass", "FlashInferExperts", 128, "fp8 block 128x128"),
        (96, "deep_gemm", "TritonOrDeepGemmExperts", 128, "fp8 block 128x128"),
        (192, "marlin", "MarlinExperts", 256, "fp8 block 128x128"),
    ],
)
def test_blocks_that_ranks_cut_across(
    intermediate: int, request_: str | None, experts: str, padded: int, weight: str
) -> None:
    problem = replace(FP8, dims=Dims(2048, intermediate), parallel=Parallel(tp=8))
    decision = ask(problem, "h100", only=request_)
    assert decision.chosen is not None, decision.error
    assert decision.chosen.variant.experts == experts
    assert decision.problem.dims == Dims(2048, intermediate, 2048, padded)
    asked = next(v for v in decision.chosen.verdicts if v.question == "number formats")
    assert asked.wanted.startswith(weight)


@pytest.mark.parametrize(
    ("problem", "request_", "kind"),
    [
        # No block of 32 or more divides one rank's slice: it fails when the weights are made.
        (replace(FP8, dims=Dims(2048, 48), parallel=Parallel(tp=8)), None, "ValueError"),
        # Padding needs whole blocks in the whole model.
        (replace(FP8, dims=Dims(2048, 48), parallel=Parallel(tp=8)), "marlin", ""),
        (replace(FP8, dims=Dims(2048, 40), parallel=Parallel(tp=8)), "marlin", "ValueError"),
        (replace(FP8, dims=Dims(2048, 96), parallel=Parallel(tp=8), bias=True), "marlin", "ValueError"),
        # Not every pair of scales has a method.
        (replace(COMPRESSED, scheme=Scheme(CHANNEL.weight)), None, "ValueError"),
        (replace(COMPRESSED, scheme=Scheme(CHANNEL.weight, STATIC.act)), None, "AssertionError"),
        (replace(FP8, storage="quark", scheme=Scheme(CHANNEL.weight, STATIC.act)), None, "ValueError"),
        (
            replace(COMPRESSED, scheme=replace(W8A8, weight=WeightFormat("int8", 8, TENSOR))),
            None,
            "ValueError",
        ),
        (replace(COMPRESSED, scheme=replace(W4A8, weight=int_format(4, 64))), None, "AssertionError"),
        (replace(COMPRESSED, scheme=W4A8, dims=Dims(2048, 384)), None, "AssertionError"),
        (
            replace(COMPRESSED, scheme=replace(W4A8, weight=int_format(4, 128, zero_point=True))),
            None,
            "RuntimeError",
        ),
        (replace(COMPRESSED, scheme=W4A8), "triton", "ValueError"),
        (replace(COMPRESSED, scheme=W4A8, dtype="fp16"), "cutlass", "NotImplementedError"),
    ],
)
def test_refusals_have_the_engines_exception(problem: MoEProblem, request_: str | None, kind: str) -> None:
    decision = ask(problem, "h100", only=request_)
    assert decision.error_kind == kind, decision.error
    assert decision.usable == (not kind)


def test_plug_ins_compute_unquantized_and_fp8_layers_and_nothing_is_said_of_others() -> None:
    for gpu, name, devices in (("tpu", "TPU", "TPUs"), ("out-of-tree", "OOT", "out-of-tree devices")):
        decision = ask(QWEN, gpu)
        assert (decision.stand_in, decision.chosen, decision.candidates) == (name, None, ())
        assert "plug-in" in decision.error and not decision.error_kind
        assert ask(FP8, gpu).stand_in == "NONE"
        with pytest.raises(OutOfScope, match=f"do not cover {devices}"):
            ask(replace(QWEN, scheme=Scheme(MXFP4), storage="mxfp4"), gpu)
    assert ask(FP8, "cpu", only="marlin").error_kind == "ValueError"


def test_cutlass_by_name_says_that_the_method_never_takes_it() -> None:
    decision = ask(FP8, "h100", only="cutlass")
    assert decision.error_kind == "ValueError"
    assert "never used by this method" in decision.error
    assert ask(COMPRESSED, "h100", only="cutlass").require().engine_name == "VLLM_CUTLASS"


def test_requests_that_do_nothing_are_told() -> None:
    assert ask(QWEN, "h100", only="marlin").ignored
    assert ask(replace(QWEN, lora=True), "h100", only="triton").ignored
    assert not ask(QWEN, "h100", only="triton").ignored
    assert not ask(QWEN, "h100").ignored


def test_balancing_that_a_method_does_not_do_is_noted() -> None:
    balanced = Parallel(tp=8, ep=True, eplb=True)
    static = replace(FP8, scheme=STATIC, parallel=balanced)
    assert not any("EPLB" in note for note in ask(static, "h100").notes)
    notes = ask(replace(static, storage="modelopt"), "h100").notes
    assert any("EPLB" in note for note in notes)
