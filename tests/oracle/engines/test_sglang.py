"""SGLang 0.5.23: recorded decisions of both stages, and what was not recorded is said."""

from pathlib import Path

import pytest
from devtools.conformance import read_rows
from devtools.sglang_recording.compare import compared

from moectl.checkpoint import open_checkpoint
from moectl.environment import find_device
from moectl.explain.decision_words import reason_words
from moectl.oracle import SelectionInputs, decide, engine_named, packages_from
from moectl.oracle.decision import ARGUMENTS
from moectl.problem.moe_problem import Parallel
from support.invoking import moectl

SGLANG = engine_named("sglang")
ROWS = list(read_rows(Path(__file__).parents[2] / "data" / "oracle" / "sglang-0.5.23.jsonl.gz"))
FP8, GPT, AWQ = "Qwen/Qwen3-30B-A3B-FP8", "openai/gpt-oss-120b", "TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ"


def decision(name, gpu, requested=None, parallel=None, packages="sglang"):
    opened = open_checkpoint(name, offline=True)
    problem = opened.groups[0].problem.on(parallel or Parallel(all2all="none"))
    inputs = SelectionInputs(
        problem, find_device(gpu), packages_from(packages, engine=SGLANG), SGLANG.name, requested,
        model=opened.model,
    )  # fmt: skip
    return decide(inputs)


def declared_apart(row):
    """True where SGLang reads the quantization, which is in hf_quant_config.json, after it has refused."""
    named = row["forced"] == "flashinfer_cutedsl" or row["a2a"] == "flashinfer_megamoe"
    return named and row["device"] == "sm100" and row["checkpoint"].endswith("-NVFP4")


def test_both_stages_agree_with_every_recorded_decision():
    found = [compared(row, "sglang==0.5.23") for row in ROWS]
    stages = [c.arguments for c in found], [c.layer for c in found if c.layer is not None]
    assert all(len(stage) > 2000 for stage in stages)
    assert [c for c in found if len(set(c.arguments)) > 1 and not declared_apart(c.row)] == []
    assert [c for c in found if c.layer is not None and len(set(c.layer)) > 1] == []
    refused = [c for c in found if c.arguments[0] == "refused"]
    failed = [c for c in found if c.layer is not None and not c.layer[0].runner]
    assert len(refused) > 300 and len(failed) > 300


@pytest.mark.parametrize(
    ("name", "gpu", "runner", "experts"),
    [
        (FP8, "h200", "triton", "Fp8MoEMethod"),
        (FP8, "b200", "flashinfer_trtllm", "Fp8MoEMethod"),
        (GPT, "h200", "triton_kernel", "Mxfp4MoEMethod"),
        (GPT, "b200", "flashinfer_mxfp4", "Mxfp4MoEMethod"),
        (AWQ, "a100", "marlin", "AWQMoEScheme"),
    ],
)
def test_the_first_stage_follows_the_model_and_the_gpu(name, gpu, runner, experts):
    chosen = decision(name, gpu).require()
    assert (chosen.engine_name, chosen.variant.experts) == (runner, experts)


def test_the_first_stage_is_the_reason_where_it_decides():
    says = reason_words(decision(GPT, "b200"))
    assert says == "SGLang's default runner of GptOssForCausalLM on SM100; all checks pass"
    assert reason_words(decision(FP8, "h200")).startswith("highest priority")
    assert reason_words(decision(GPT, "h200", "triton")) == "requested by name; all checks pass"


def test_a_named_runner_is_refused_by_server_arguments_with_the_reason():
    (gate,) = decision(FP8, "h200", "flashinfer_cutedsl").gates
    assert gate.kind == ARGUMENTS and "flashinfer_cutedsl is for --quantization modelopt_fp4" in gate.says


def test_a_runner_without_kernels_for_the_exchange_says_so():
    found = decision(GPT, "b200", "marlin", Parallel(dp=4, ep=True, all2all="deepep"))
    assert not found.usable and found.error_kind == "NotImplementedError"
    assert "does not support an all2all exchange; this setup uses deepep" in found.error


def test_a_runner_that_is_accepted_without_kernels_is_chosen_with_a_warning():
    found = decision(FP8, "h200", "humming")
    assert found.require().engine_name == "humming"
    assert any("fails on the first token (AttributeError)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "gpu", "ep", "packages", "says"),
    [
        ("amd/Kimi-K2.5-MXFP4", "h200", False, "sglang", "fails on loading weights (NameError): it shuffles"),
        ("amd/Kimi-K2.5-MXFP4", "mi355x", False, "sglang_rocm", "fails on loading weights (NameError)"),
        (GPT, "cpu", False, "sglang_cpu", "fails on the first token (AttributeError): it repacks"),
        (GPT, "cpu", True, "sglang_cpu", "fails on loading weights (RuntimeError): it dequantizes"),
        (FP8, "a100", False, "sglang", "fails on the first token (CompilationError): it multiplies FP8"),
        (
            FP8,
            "cpu",
            False,
            "sglang_cpu",
            "fails on loading weights (AssertionError): it needs a CPU",
        ),
    ],
)
def test_a_runner_that_the_device_cannot_run_is_chosen_with_a_warning(name, gpu, ep, packages, says):
    parallel = Parallel(tp=4, ep=True, all2all="none") if ep else None
    found = decision(name, gpu, parallel=parallel, packages=packages)
    assert found.usable and any(says in note for note in found.notes)
    assert not any("fails" in note for note in decision(name, "mi355x", packages="sglang_rocm_aiter").notes)


@pytest.mark.parametrize("gpu", ["l40s", "h200"])
def test_fp8_in_triton_has_no_warning_where_triton_compiles_it(gpu):
    found = decision(FP8, gpu, "triton")
    assert found.usable and not any("fails" in note for note in found.notes)


def test_aiter_is_a_switch():
    assert decision(FP8, "mi355x", packages="sglang_rocm").require().engine_name == "triton"
    assert decision(FP8, "mi355x", packages="sglang_rocm_aiter").require().engine_name == "aiter"


def test_its_variables_are_known_by_name():
    found = {row.name: row.remark for row in SGLANG.judge({"SGLANG_USE_AITR": "1", "SGLANG_MORI_EP_V2": "1"})}
    assert "did you mean SGLANG_USE_AITER" in found["SGLANG_USE_AITR"]
    assert "SGLANG_MORI_EP_V2" not in found


def test_what_was_not_recorded_is_marked():
    balanced = decision(FP8, "h200", parallel=Parallel(tp=2, ep=True, eplb=True, all2all="none"))
    assert "from source, not recorded: expert load balancing" in balanced.notes
    assert not any("not recorded" in note for note in decision(FP8, "h200").notes)


def test_why_is_about_the_runner_that_was_named():
    """Methods that put Triton in its place do not make it the answer."""
    assert SGLANG.policy.requested_backends("deep_gemm") == {"deep_gemm"}
    said = moectl(
        "explain", FP8, "--offline", "--gpu", "h200", "--engine", "sglang", "--why", "deep_gemm"
    ).words
    assert "is chosen" not in said and "deep_gemm" in said


def test_explain_answers_with_a_command_of_its_own():
    ask = ("explain", FP8, "--offline", "--gpu", "h200", "--engine", "sglang")
    said = moectl(*ask, "--dp", "8", "--ep", "--all2all", "deepep").words
    assert "SGLang 0.5.23" in said and "deep_gemm" in said
    assert "--tp-size 8 --attn-dp-size 8 --ep-size 8 --moe-a2a-backend deepep" in said
    assert [row["policy"] for row in moectl(*ask, "--json").document["groups"][0]["others"]] == []
