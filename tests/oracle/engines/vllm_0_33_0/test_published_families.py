"""Families outside the recorded grid: rules read from the engine's source, held by one case each."""

from dataclasses import replace

import pytest

from moectl.environment import Packages, find_device
from moectl.oracle import Decision, policy_named, select
from moectl.oracle.machine_packages import packages_from
from moectl.problem.moe_problem import Activation, Dims, MoEProblem, Parallel, Routing
from moectl.problem.schemes import (
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
    int_format,
)

VLLM = policy_named("vllm-0.33.0")
FULL_INSTALL = packages_from("full")
AITER = packages_from("rocm_aiter_quark")
DEEPSEEK_V4 = MoEProblem(
    Dims(4096, 2048),
    experts=256,
    top_k=6,
    scheme=Scheme(MXFP4),
    activation=Activation("silu", limit=10.0),
    routing=Routing("sqrtsoftplus", correction_bias=True),
    storage="mxfp4",
    shared_experts=1,
)
KIMI_K3 = MoEProblem(
    Dims(3584, 3072),
    experts=896,
    top_k=16,
    scheme=Scheme(MXFP4),
    activation=Activation("situ", beta=4.0, linear_beta=25.0),
    routing=Routing("sigmoid", correction_bias=True, groups=1, topk_groups=1),
    storage="compressed-tensors",
    model_hidden=7168,
)
NEMOTRON = MoEProblem(
    Dims(2688, 1856),
    experts=128,
    top_k=6,
    scheme=Scheme(NVFP4, NVFP4_ACT),
    activation=Activation("relu2", gated=False),
    routing=Routing("sigmoid", correction_bias=True, groups=1, topk_groups=1),
    storage="modelopt",
)
EP8 = Parallel(tp=8, ep=True)
DP8 = Parallel(dp=8, ep=True)


def ask(
    problem: MoEProblem, gpu: str, packages: Packages = FULL_INSTALL, only: str | None = None
) -> Decision:
    return select(problem, find_device(gpu), packages, VLLM, only)


def experts(decision: Decision) -> str:
    return decision.require().variant.experts


@pytest.mark.parametrize(
    ("problem", "gpu", "packages", "expected"),
    [
        (DEEPSEEK_V4, "b200", FULL_INSTALL, "TrtLlmMxfp4ExpertsModular"),
        (DEEPSEEK_V4, "h100", FULL_INSTALL, "HummingIndexedExperts"),
        (DEEPSEEK_V4, "a100", FULL_INSTALL, "MarlinExperts"),
        (DEEPSEEK_V4, "rtx5090", FULL_INSTALL, "DeepGemmFP4Experts"),
        (DEEPSEEK_V4, "mi355x", AITER, "AiterMxfp4Experts"),
        (DEEPSEEK_V4, "mi300x", packages_from("rocm_default"), "UnfusedOAITritonExperts"),
        (KIMI_K3, "b200", FULL_INSTALL, "TrtLlmMxfp4ExpertsMonolithic"),
        (KIMI_K3.on(DP8), "b200", FULL_INSTALL, "TrtLlmMxfp4ExpertsModular"),
        (KIMI_K3, "h100", FULL_INSTALL, "HummingIndexedExperts"),
        (KIMI_K3, "mi355x", AITER, "AiterMxfp4Experts"),
        (NEMOTRON, "b200", FULL_INSTALL, "TrtLlmNvFp4ExpertsMonolithic"),
        (NEMOTRON, "rtx5090", FULL_INSTALL, "FlashInferExperts"),
        (NEMOTRON, "h100", FULL_INSTALL, "HummingIndexedExperts"),
        (replace(NEMOTRON, scheme=Scheme(NVFP4)), "b200", FULL_INSTALL, "MarlinExperts"),
    ],
)
def test_choices(problem: MoEProblem, gpu: str, packages: Packages, expected: str) -> None:
    assert experts(ask(problem, gpu, packages)) == expected


def test_experts_of_deepseek_v4_in_nvfp4_follow_their_own_config() -> None:
    nvfp4 = replace(DEEPSEEK_V4, scheme=Scheme(NVFP4, NVFP4_ACT), storage="modelopt")
    assert experts(ask(nvfp4, "b200")) == "TrtLlmNvFp4ExpertsModular"
    assert not ask(nvfp4, "xpu", Packages()).gates
    assert ask(NEMOTRON, "xpu", Packages()).gates


def test_a_clamp_leaves_out_kernels_that_apply_none() -> None:
    nvfp4 = replace(DEEPSEEK_V4, scheme=Scheme(NVFP4, NVFP4_ACT), storage="modelopt")
    low_latency = Parallel(dp=8, ep=True, all2all="deepep_low_latency")
    assert ask(nvfp4.on(low_latency), "b200").chosen is None
    plain = replace(nvfp4, activation=Activation("silu"))
    assert experts(ask(plain.on(low_latency), "b200")) == "FlashInferCuteDSLBatchedExperts"
    asked = ask(nvfp4, "rtx5090", only="flashinfer_b12x")
    assert asked.error_kind == "ValueError"
    assert "FlashInferB12xExperts is used only for activations without a clamp" in asked.error


@pytest.mark.parametrize(
    ("problem", "parallel", "usable"),
    [
        (DEEPSEEK_V4, EP8, True),
        (DEEPSEEK_V4, Parallel(), False),
        (KIMI_K3, EP8, True),
        (replace(KIMI_K3, storage="mxfp4", activation=Activation("silu")), EP8, False),
    ],
)
def test_a_models_own_megakernel_is_taken_on_request(
    problem: MoEProblem, parallel: Parallel, usable: bool
) -> None:
    decision = ask(problem.on(parallel), "b200", only="deep_gemm_mega_moe")
    assert decision.usable == usable
    if usable:
        assert experts(decision) == "DeepGemmMegaMoEExperts"
    else:
        assert decision.error_kind in ("NotImplementedError", "ValueError")
    assert not ask(problem.on(parallel), "h100", only="deep_gemm_mega_moe").usable


def test_the_megakernel_of_aiter_needs_its_exchange() -> None:
    mori = Parallel(dp=8, ep=True, all2all="mori_high_throughput")
    assert experts(ask(DEEPSEEK_V4.on(mori), "mi355x", AITER, "aiter_mega_moe")).startswith("DeepseekV4Aiter")
    other = ask(DEEPSEEK_V4.on(DP8), "mi355x", AITER, "aiter_mega_moe")
    assert "needs all2all mori" in other.error


def test_kimi_k3_pads_thin_slices_itself() -> None:
    thin = ask(KIMI_K3.on(Parallel(tp=16)), "b200")
    assert thin.problem.dims.intermediate == 192
    assert thin.problem.dims.padded_intermediate == 256
    assert any("pads one rank's shard from 192 to 256" in note for note in thin.notes)
    assert ask(KIMI_K3.on(Parallel(tp=8)), "b200").problem.dims.padded_intermediate == 384


def test_kimi_k3_needs_a_flashinfer_with_its_activation() -> None:
    lacking = replace(FULL_INSTALL, missing=frozenset({"flashinfer:tllm_enums.Situ"}))
    decision = ask(KIMI_K3, "b200", lacking)
    assert experts(decision) == "DeepGemmFP4Experts"
    trtllm = next(c for c in decision.candidates if c.backend.name == "flashinfer_trtllm_afp8")
    assert [v.question for v in trtllm.failed] == ["SiTU in FlashInfer"]


def test_b12x_takes_the_published_parameters_of_situ_only() -> None:
    assert experts(ask(KIMI_K3, "rtx5090", packages_from("with_optional"), "b12x")) == "B12xExperts"
    other = replace(KIMI_K3, activation=Activation("situ", beta=1.0, linear_beta=1.0))
    assert not ask(other, "rtx5090", packages_from("with_optional"), "b12x").usable


def fp8(block: tuple[int, int], dynamic: bool = True) -> ActFormat:
    return ActFormat("fp8", 8, block, dynamic)


@pytest.mark.parametrize(
    ("storage", "weight", "act", "method", "kind"),
    [
        ("compressed-tensors", MXFP4, fp8((1, FULL)), "CompressedTensorsW4A8Mxfp4MoEMethod", ""),
        ("compressed-tensors", MXFP4, fp8((1, 64)), "CompressedTensorsW4A8Mxfp4MoEMethod", ""),
        ("compressed-tensors", MXFP4, MXFP8_ACT, "CompressedTensorsW4A8Mxfp4MoEMethod", ""),
        ("compressed-tensors", MXFP4, MXFP4_ACT, "CompressedTensorsW4A4Mxfp4MoEMethod", ""),
        ("compressed-tensors", NVFP4, fp8((1, FULL)), "CompressedTensorsW4A4Nvfp4MoEMethod", "ValueError"),
        ("quark", MXFP4, fp8((FULL, FULL)), "QuarkOCP_MX_MoEMethod", "NotImplementedError"),
        ("quark", MXFP4, MXFP8_ACT, "QuarkOCP_MX_MoEMethod", "RuntimeError"),
        ("quark", NVFP4, NVFP4_ACT, "QuarkNvfp4MoEMethod", ""),
        ("quark", NVFP4, ActFormat(), "QuarkNvfp4MoEMethod", "RuntimeError"),
        ("quark", MXFP8, MXFP8_ACT, "QuarkW8A8Mxfp8MoEMethod", ""),
        ("modelopt", MXFP4, ActFormat(), "ModelOptMixedPrecisionConfig", "ValueError"),
        ("fp8", MXFP8, MXFP8_ACT, "ModelOptMxFp8FusedMoE", ""),
    ],
)
def test_methods_of_formats(
    storage: str, weight: WeightFormat, act: ActFormat, method: str, kind: str
) -> None:
    problem = MoEProblem(Dims(2048, 768), 128, 8, Scheme(weight, act), storage=storage)
    decision = ask(problem, "b200")
    assert (decision.method, decision.error_kind) == (method, kind)
    assert decision.usable == (not kind)


def test_swiglu_of_gpt_oss_in_rows_apart_is_served_in_mxfp8() -> None:
    minimax = MoEProblem(
        Dims(6144, 3072),
        experts=128,
        top_k=4,
        scheme=Scheme(MXFP8, MXFP8_ACT),
        activation=Activation("swigluoai", alpha=1.702, limit=7.0),
        routing=Routing("sigmoid", correction_bias=True, scale=2.0),
        storage="fp8",
    )
    assert experts(ask(minimax, "b200")) == "TrtLlmFp8ExpertsMonolithic"
    assert experts(ask(minimax, "mi355x", AITER)) == "AiterMxfp8Experts"
    steep = replace(minimax, activation=Activation("swigluoai", alpha=1.0, limit=7.0))
    assert experts(ask(steep, "mi355x", AITER)) == "Mxfp8NativeTritonExperts"
    sliced = ask(minimax.on(Parallel(tp=8, dp=2, ep=True)), "b200")
    assert experts(sliced) == "TrtLlmFp8ExpertsModular"
    monolithic = next(c for c in sliced.candidates if c.variant.monolithic)
    assert [v.question for v in monolithic.failed] == ["token sequence"]


def test_experts_without_a_gate_need_a_gpu() -> None:
    assert [gate.kind for gate in ask(NEMOTRON, "cpu", Packages()).gates] == ["gating"]
    assert not ask(NEMOTRON, "h100").gates


INTEGERS = MoEProblem(Dims(2048, 768), experts=128, top_k=8, scheme=Scheme(int_format(4, 128)))


def test_quark_integers_never_reach_marlin() -> None:
    quark = replace(INTEGERS, storage="quark")
    assert ask(quark, "a100").require().variant.experts == "TritonWNA16Experts"
    named = ask(quark, "a100", only="marlin")
    assert named.error_kind == "ValueError"
    assert [verdict.question for verdict in named.candidates[0].failed] == ["checkpoint storage"]
    # Batched tokens go to Marlin alone.
    low_latency = Parallel(dp=8, ep=True, all2all="deepep_low_latency")
    assert ask(quark.on(low_latency), "a100").error_kind == "NotImplementedError"
    packed = replace(INTEGERS, storage="compressed-tensors")
    assert ask(packed, "a100").require().variant.experts == "MarlinExperts"


@pytest.mark.parametrize("hidden", [2048, 2000])
def test_integers_that_the_engine_does_not_load(hidden: int) -> None:
    whole = replace(INTEGERS, dims=Dims(hidden, 768))
    zero_points = replace(whole, storage="gptq", scheme=Scheme(int_format(4, 128, zero_point=True)))
    assert "zero points" in ask(zero_points, "a100").error
    wide = replace(whole, storage="awq", scheme=Scheme(int_format(8, 128, zero_point=True)))
    assert "4-bit weights" in ask(wide, "a100").error
    assert {ask(problem, "a100").error_kind for problem in (zero_points, wide)} == {"ValueError"}
