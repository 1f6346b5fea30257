"""TensorRT-LLM: answers worked out by hand from its source, and what holds for every answer.

Nothing was recorded from the engine. Each row of a table names the function of its source that decides;
docs/tensorrt_llm.md has the commit that each file was read at.
"""

from dataclasses import replace

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import model_names
from moectl.environment import find_device
from moectl.errors import UsageError
from moectl.oracle import SelectionInputs, decide, engine_named, packages_from
from moectl.oracle.decision import DEPLOYMENT
from moectl.oracle.engines.tensorrt_llm.backends import FAMILIES, IMPLEMENTATIONS
from moectl.oracle.engines.tensorrt_llm.quantization import ALGORITHMS
from moectl.oracle.verdict_sentences import reasons
from moectl.problem.moe_problem import Parallel
from support.invoking import moectl
from support.sampling import every_nth

ENGINE = engine_named("tensorrt-llm")
GPUS = ("v100", "a100", "l40s", "h200", "b200", "b300", "thor", "rtx-pro-6000", "gb10")
ONE, TP8, EP8 = (
    Parallel(all2all="auto"),
    Parallel(tp=8, all2all="auto"),
    Parallel(tp=8, ep=True, all2all="auto"),
)
DEP8 = Parallel(dp=8, ep=True, all2all="auto")

GPT = "openai/gpt-oss-120b"
R1, R1_FP4 = "deepseek-ai/DeepSeek-R1", "nvidia/DeepSeek-R1-0528-FP4"
QWEN, QWEN_FP8 = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-FP8"
QWEN35_FP4, W4A16 = "nvidia/Qwen3.5-397B-A17B-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4"
V4, K3, M3 = "deepseek-ai/DeepSeek-V4-Flash", "moonshotai/Kimi-K3", "MiniMaxAI/MiniMax-M3-MXFP8"
NEMOTRON = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8"
SCOUT = "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic"


def decision(name, gpu, requested=None, parallel=ONE, env=None, packages="tensorrt_llm", **changes):
    opened = open_checkpoint(name, offline=True)
    problem = replace(opened.groups[-1].problem, **changes).on(parallel)
    inputs = SelectionInputs(
        problem, find_device(gpu), packages_from(packages, env, ENGINE), ENGINE.name, requested,
        model=opened.model,
    )  # fmt: skip
    return decide(inputs)


NATIVE, COPY = "TrtllmTrtllmGen", "FlashinferTrtllmGen"
FLASHINFER = {"TRTLLM_GEN_FUSED_MOE_USE_FLASHINFER": "1"}

AUTOMATIC = [
    # ModelConfig.resolve_moe_backend: GptOssForCausalLM; ModelConfig.get_mxfp4_quant_algo
    (GPT, "h200", "TritonFusedMoE"),
    (GPT, "b200", f"{NATIVE}W4a8Mxfp4Mxfp8Impl"),
    (GPT, "b300", f"{NATIVE}W4a8Mxfp4Mxfp8Impl"),
    (GPT, "rtx-pro-6000", "CutlassFusedMoE"),
    # CutlassFusedMoE._QUANT_SUPPORT_TABLE: W4A16_MXFP4 on SM90 alone, W4A8_MXFP4_MXFP8 not on SM110
    (GPT, "a100", None),
    (GPT, "thor", None),
    # resolve_moe_backend: FP8_BLOCK_SCALES on is_sm_100f; CUTLASS has it on SM90 and SM120
    (R1, "b200", f"{NATIVE}Fp8BlockScalesImpl"),
    (R1, "h200", "CutlassFusedMoE"),
    (R1, "rtx-pro-6000", "CutlassFusedMoE"),
    (R1, "l40s", None),
    (R1, "gb10", None),
    # ... and NVFP4 on SM100, SM103, SM120, SM121
    (R1_FP4, "b200", "CutlassFusedMoE"),
    (R1_FP4, "gb10", "CutlassFusedMoE"),
    (R1_FP4, "h200", None),
    # test_qwen35_moe_model_defaults, description of #17293: NVFP4 and mixed precision
    (QWEN35_FP4, "h200", "MarlinFusedMoE"),
    (QWEN35_FP4, "l40s", "MarlinFusedMoE"),
    (QWEN35_FP4, "b200", "CutlassFusedMoE"),
    (QWEN35_FP4, "a100", None),
    ("Qwen/Qwen3.5-35B-A3B", "h200", "CutlassFusedMoE"),
    (W4A16, "h200", "MarlinFusedMoE"),
    (W4A16, "l40s", "MarlinFusedMoE"),
    # resolve_moe_backend: mixed precision has no row
    (W4A16, "rtx-pro-6000", "CutlassFusedMoE"),
    (W4A16, "b200", "CutlassFusedMoE"),
    (W4A16, "a100", "CutlassFusedMoE"),
    # resolve_moe_backend: _DEEPSEEK_V4_ARCHITECTURES, _KIMI_K3_ARCHITECTURES
    (V4, "b200", f"{NATIVE}W4a8Mxfp4Mxfp8Impl"),
    (V4, "h200", "CutlassFusedMoE"),
    (K3, "b200", f"{NATIVE}W4a8Mxfp4Mxfp8Impl"),
    (K3, "rtx-pro-6000", "CutlassFusedMoE"),
    (K3, "h200", None),
    # the last row of resolve_moe_backend
    (QWEN, "a100", "CutlassFusedMoE"),
    (QWEN, "b200", "CutlassFusedMoE"),
    (QWEN, "v100", None),
    (M3, "b200", "CutlassFusedMoE"),
    (M3, "h200", None),
    (NEMOTRON, "l40s", "CutlassFusedMoE"),
    (NEMOTRON, "a100", None),
]


@pytest.mark.parametrize(("name", "gpu", "experts"), AUTOMATIC)
def test_auto_takes_a_backend_by_model_format_and_gpu(name, gpu, experts):
    found = decision(name, gpu)
    assert (found.chosen.variant.experts if found.chosen else None) == experts
    assert found.error_kind == ("" if experts else "ValueError")


@pytest.mark.parametrize(
    ("gpu", "experts"),
    [
        # resolve_moe_backend: W4A16_NVFP4 of the whole checkpoint
        ("h200", "MarlinFusedMoE"),
        ("rtx-pro-6000", "CuteDslB12xFusedMoE"),
        ("b200", "CutlassFusedMoE"),
        ("l40s", "CutlassFusedMoE"),
        ("a100", "CutlassFusedMoE"),
    ],
)
def test_auto_takes_a_backend_for_checkpoints_of_w4a16_nvfp4(gpu, experts):
    scheme = open_checkpoint(W4A16, offline=True).groups[0].problem.scheme
    found = decision(QWEN, gpu, scheme=scheme, storage="modelopt")
    assert found.chosen.variant.experts == experts


def test_qwen35_runs_16_bit_activations_as_nvfp4_on_sm100_and_sm103_alone():
    # _normalize_qwen35_quant_config_dict
    methods = {gpu: decision(W4A16, gpu).method for gpu in ("b200", "b300", "rtx-pro-6000", "h200")}
    assert methods == {
        "b200": "NVFP4", "b300": "NVFP4", "rtx-pro-6000": "W4A16_NVFP4", "h200": "W4A16_NVFP4",
    }  # fmt: skip
    assert decision(W4A16, "b200", "trtllm").chosen.variant.experts == f"{NATIVE}Nvfp4Impl"


NAMED = [
    # <class>.can_implement of the class that is expected, or of the one that is rejected
    (R1, "b200", "deepgemm", ONE, "DeepgemmCudaFp8BlockScalesImpl"),
    (R1_FP4, "b200", "deepgemm", ONE, "CutlassFusedMoE"),
    (R1_FP4, "b200", "trtllm", ONE, f"{NATIVE}Nvfp4Impl"),
    (R1_FP4, "b200", "cutedsl", EP8, "CuteDslFusedMoE"),
    (R1_FP4, "b200", "densegemm", TP8, "DenseGEMMFusedMoE"),
    (R1_FP4, "b200", "densegemm", EP8, "CutlassFusedMoE"),
    (R1_FP4, "b200", "megamoe_cutedsl", EP8, "MegaMoECuteDsl"),
    (R1_FP4, "b200", "megamoe_cutedsl", TP8, "CutlassFusedMoE"),
    (R1_FP4, "rtx-pro-6000", "cutedsl", TP8, "CuteDslB12xFusedMoE"),
    (R1_FP4, "rtx-pro-6000", "cutedsl", DEP8, "CutlassFusedMoE"),
    (R1_FP4, "h200", "marlin", EP8, "MarlinFusedMoE"),
    (R1_FP4, "h200", "vanilla", ONE, "VanillaMoE"),
    (V4, "b200", "megamoe_deepgemm", DEP8, "DeepgemmCudaW4a8Mxfp4Mxfp8Impl"),
    (V4, "b200", "megamoe_deepgemm", EP8, "CutlassFusedMoE"),
    (K3, "b200", "megamoe_deepgemm", DEP8, "DeepgemmCudaW4a8Mxfp4Mxfp8Impl"),
    # get_mxfp4_quant_algo gives W4A8_MXFP4_FP8 to TRITON from SM100 on, which only CUTLASS runs there
    (GPT, "b200", "triton", ONE, "CutlassFusedMoE"),
    (GPT, "h200", "trtllm", ONE, "CutlassFusedMoE"),
    # FlashinferTrtllmGenBf16Impl: a shard of 768 / 8 is no multiple of 128
    (QWEN, "b200", "trtllm", ONE, f"{COPY}Bf16Impl"),
    (QWEN, "b200", "trtllm", TP8, "CutlassFusedMoE"),
    (QWEN, "h200", "trtllm", ONE, "CutlassFusedMoE"),
    # MoEActivationSupport: Geglu is not among TRTLLM-Gen's, a clamp is not among DenseGEMM's constants
    ("google/gemma-4-26B-A4B", "b200", "trtllm", ONE, "CutlassFusedMoE"),
    # moe_resolution.NO_FALLBACK_BACKENDS; allow_backend_degradation of Kimi-K3's model
    (GPT, "h200", "vanilla", ONE, None),
    (K3, "b200", "cutedsl", ONE, None),
    (K3, "b200", "megamoe_cutedsl", DEP8, None),
    # _candidates_for: deprecated
    (R1, "b200", "wideep", ONE, None),
]


@pytest.mark.parametrize(("name", "gpu", "backend", "parallel", "experts"), NAMED)
def test_a_named_backend_runs_or_falls_back_to_cutlass_or_fails(name, gpu, backend, parallel, experts):
    found = decision(name, gpu, backend, parallel)
    assert (found.chosen.variant.experts if found.chosen else None) == experts
    fell = experts is not None and found.chosen.backend.name != backend
    warned = [note for note in found.notes if "warns and falls back to CutlassFusedMoE" in note]
    assert bool(warned) == fell
    assert found.error_kind == ("" if experts else "ValueError")


def test_reasons_are_those_of_the_asked_classes():
    error = decision(K3, "b200", "cutedsl").error
    assert "CuteDslFusedMoE supports only Relu2, Swiglu; model uses SiTu" in error
    assert "Marlin" not in error and "Cutlass" not in error
    codes = {
        verdict.code for c in decision(R1_FP4, "b200", "deepgemm").candidates[:1] for verdict in c.failed
    }
    assert codes == {"quant_unsupported"}


UNREAD = [
    ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "NotImplementedError", "does not read gptq checkpoints"),
    ("QuantTrio/Qwen3.6-35B-A3B-AWQ", "NotImplementedError", "does not read awq checkpoints"),
    ("amd/DeepSeek-V4-Pro-MXFP4", "NotImplementedError", "does not read quark checkpoints"),
    ("RedHatAI/Qwen3-30B-A3B-quantized.w4a16", "TypeError", "without activation quantization"),
]


@pytest.mark.parametrize(("name", "kind", "says"), UNREAD)
def test_checkpoints_that_the_loader_refuses(name, kind, says):
    for backend in (None, "cutlass", "vanilla"):
        found = decision(name, "b200", backend)
        assert (found.usable, found.error_kind) == (False, kind) and says in found.error


def test_int4_awq_of_modelopt_runs_with_fp8_activations_on_ada_and_hopper():
    scheme = open_checkpoint("RedHatAI/Qwen3-30B-A3B-quantized.w4a16", offline=True).groups[0].problem.scheme
    awq = {"storage": "modelopt", "scheme": scheme}
    assert not decision(QWEN, "h200", **awq).usable
    assert decision(QWEN, "h200", "vanilla", **awq).require().engine_name == "VANILLA"
    fp8 = open_checkpoint(NEMOTRON, offline=True).groups[0].problem.scheme.act
    awq["scheme"] = replace(scheme, act=fp8)
    usable = {gpu for gpu in GPUS if decision(QWEN, gpu, **awq).usable}
    assert usable == {"l40s", "h200"}


def test_flashinfers_copy_is_opt_in_and_knows_fewer_routing_methods():
    assert decision(QWEN_FP8, "b200").require().variant.experts == f"{NATIVE}Fp8BlockScalesImpl"
    asked = decision(QWEN_FP8, "b200", env=FLASHINFER)
    assert asked.require().variant.experts == f"{COPY}Fp8BlockScalesImpl"
    assert decision(R1, "b200", env=FLASHINFER).require().variant.experts == f"{NATIVE}Fp8BlockScalesImpl"
    without = decision(QWEN, "b200", "trtllm", packages="none")
    assert without.require().engine_name == "CUTLASS"


def test_a_variable_sets_the_activations_of_mxfp4_experts():
    found = decision(GPT, "h200", env={"OVERRIDE_QUANT_ALGO": "W4A8_MXFP4_FP8"})
    assert (found.route, found.require().engine_name) == ("W4A8_MXFP4_FP8", "TRITON")
    assert any("OVERRIDE_QUANT_ALGO takes" in note for note in found.notes)
    assert decision(GPT, "h200", env={"OVERRIDE_QUANT_ALGO": "W4A4"}).route == "W4A16_MXFP4"


def test_nvfp4_needs_whole_tiles_of_gate_and_up():
    # impl_contract.nvfp4_fc1_row_alignment_rejection: 2 * 2048 / 64 = 64 rows
    found = decision(R1_FP4, "b200", "cutedsl", Parallel(tp=64, all2all="auto"))
    assert not found.usable
    assert "rows of gate and up: needs multiples of 128; this is 64 on each rank" in found.error


@pytest.mark.parametrize(
    ("name", "gpu", "backend", "parallel", "changes", "says"),
    [
        # ConfigurableMoE.validate_backend, ._reject_non_divisible_ep_backend; create_moe_backend
        (R1, "b200", None, replace(EP8, eplb=True), {}, "only with attention data parallelism"),
        (R1_FP4, "gb10", "cutedsl", replace(TP8, eplb=True), {}, "does not support expert load balancing"),
        (R1, "b200", None, replace(EP8, tp=6), {}, "256 experts are spread over 6 ranks"),
        (SCOUT, "h200", "vanilla", ONE, {}, "does not support router weights on the experts' input"),
        # TrtllmGenFusedMoEBase._check_before_weights
        (K3, "b200", None, Parallel(tp=128, all2all="auto"), {}, "needs whole groups of 32 on every rank"),
    ],
)
def test_building_the_layer_fails_after_the_choice(name, gpu, backend, parallel, changes, says):
    found = decision(name, gpu, backend, parallel, **changes)
    assert found.chosen is not None and (found.usable, found.error_kind) == (False, "ValueError")
    assert says in found.error


def test_balancing_and_adapters():
    assert decision(R1, "b200", parallel=replace(DEP8, eplb=True)).usable
    assert decision(R1_FP4, "h200", "marlin", replace(EP8, eplb=True)).error_kind == "ValueError"
    assert decision(QWEN, "h200", lora=True).require().engine_name == "CUTLASS"
    assert not decision(R1_FP4, "b200", lora=True).usable


def test_attention_data_parallelism_spans_all_ranks():
    (gate,) = decision(R1, "b200", parallel=Parallel(tp=2, dp=4, ep=True, all2all="auto")).gates
    assert gate.kind == DEPLOYMENT and "state --dp 8 without --tp" in gate.says


REASONS = {
    "quant_unsupported", "dtype_unsupported", "sm_unsupported", "dep_missing", "shape_unaligned",
    "slots_not_divisible_by_ep", "topology_unsupported", "lora_unsupported", "activation_unsupported",
    "routing_unsupported", "eplb_unsupported", "path_not_enabled",
}  # fmt: skip
"""`MoERejectReason`, without those that no checked class gives."""
PRIORITY = [row.experts for row in IMPLEMENTATIONS]


def test_the_table_of_priorities_is_the_resolvers():
    # moe_resolution.IMPL_PRIORITY and BACKEND_FAMILY
    leaves = ("Nvfp4", "Fp8BlockScales", "W4a16Mxfp4", "W4a8Mxfp4Mxfp8")
    assert [
        "CuteDslB12xFusedMoE", "DeepgemmCudaW4a8Mxfp4Mxfp8Impl", "MegaMoECuteDsl", "CuteDslFusedMoE",
        *(f"{COPY}{leaf}Impl" for leaf in (*leaves, "Bf16")),
        *(f"{NATIVE}{leaf}Impl" for leaf in (*leaves, "W4a8Nvfp4Fp8", "W4a8Mxfp4Fp8")),
        "DeepgemmCudaFp8BlockScalesImpl", "DenseGEMMFusedMoE", "MarlinFusedMoE", "TritonFusedMoE",
        "CutlassFusedMoE", "VanillaMoE",
    ] == PRIORITY  # fmt: skip
    assert {"wideep", *FAMILIES} < set(ENGINE.policy.request_names())
    assert {name for row in IMPLEMENTATIONS for name in row.algorithms} == set(ALGORITHMS)


@pytest.mark.parametrize("name", every_nth(model_names(), 12))
def test_every_backend_has_a_verdict_and_a_reason_everywhere(name):
    opened = open_checkpoint(name, offline=True)
    requests = (None, "trtllm", "cutedsl", "vanilla")
    for problem in dict.fromkeys(group.problem for group in opened.groups):
        for gpu in GPUS:
            for parallel in (ONE, TP8, EP8, DEP8, replace(DEP8, eplb=True)):
                try:
                    rank = problem.on(parallel)
                except UsageError:
                    continue
                for requested in requests:
                    packages = packages_from("tensorrt_llm", None, ENGINE)
                    inputs = SelectionInputs(
                        rank, find_device(gpu), packages, ENGINE.name, requested, model=opened.model
                    )
                    check(decide(inputs))


def check(found):
    """What holds for every decision."""
    assert sorted(c.variant.experts for c in found.candidates) == sorted(PRIORITY)
    for candidate in found.candidates:
        assert candidate.usable or all(text for _, text in reasons(candidate))
        assert {v.code for v in candidate.failed if v.question != "order"} <= REASONS
    asked = [c for c in found.candidates if all(v.question != "order" for v in c.failed)]
    assert [c.variant.experts for c in asked] == [
        e for e in PRIORITY if e in {c.variant.experts for c in asked}
    ]
    assert len({c.backend.name for c in asked} - {"cutlass"}) <= 1
    assert (found.chosen is None) <= bool(found.error) == bool(found.error_kind)
    if found.chosen is not None:
        assert found.chosen.usable and found.chosen is next(c for c in asked if c.usable)
    assert any("from source, not recorded" in note and "not run" in note for note in found.notes)


def test_explain_names_the_commit_and_spells_the_command():
    ask = ("explain", R1, "--offline", "--gpu", "b200", "--engine", "tensorrt-llm")
    said = moectl(*ask, "--dp", "8", "--ep", "--backend", "deepgemm").words
    assert "TensorRT-LLM d1fce83" in said
    assert "trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 8 --enable_attention_dp --ep_size 8" in said
    assert "--config <(echo 'moe_config: {backend: DEEPGEMM}')" in said
    assert [row["policy"] for row in moectl(*ask, "--json").document["groups"][0]["others"]] == []


def test_a_commit_has_no_releases():
    ask = ("explain", R1, "--offline", "--gpu", "b200", "--engine", "tensorrt-llm==1.3.0")
    assert "there are no releases of 'tensorrt-llm'" in moectl(*ask, code=2).stderr


def test_its_variables_are_known_by_name():
    env = {"TRTLLM_GEN_FUSED_MOE_USE_FLASHINFR": "1", "OVERRIDE_QUANT_ALGO": "W4A4", "TRTLLM_LOG": "1"}
    found = {row.name: row.remark for row in ENGINE.judge(env)}
    assert "did you mean TRTLLM_GEN_FUSED_MOE_USE_FLASHINFER" in found["TRTLLM_GEN_FUSED_MOE_USE_FLASHINFR"]
    assert "gives no meaning to OVERRIDE_QUANT_ALGO='W4A4'" in found["OVERRIDE_QUANT_ALGO"]
    assert set(found) == set(env) - {"TRTLLM_LOG"}
    assert ENGINE.reads("OVERRIDE_QUANT_ALGO") and not ENGINE.reads("TRTLLM_LOG")
