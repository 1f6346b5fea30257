"""What people ask first, answered in one command: why this one, why not that one, with EP, with adapters."""

import pytest

from moectl.oracle.registry import versioned
from support.invoking import moectl

GPT, KIMI, V3 = "openai/gpt-oss-20b", "moonshotai/Kimi-K2-Thinking", "deepseek-v3"


def explain(*options, code=0):
    return moectl("explain", *options, "--offline", code=code)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((GPT, "--gpu", "rtx5090"), "on SM120 (Marlin has priority over Triton on SM12x"),
        ((V3, "--gpu", "h200", "--tp", "8"), "(Triton has the highest priority for blocks on SM90 without"),
        ((V3, "--gpu", "h200", "--tp", "8", "--ep"), "(FlashInfer's CUTLASS has the highest priority"),
        # Humming moved before Marlin, but neither is chosen.
        ((GPT, "--gpu", "h200"), "pass all checks on SM90 not "),
        # Requested: the order did not decide.
        ((GPT, "--gpu", "rtx5090", "--backend", "marlin"), "requested by name; all checks pass memory"),
    ],
)
def test_a_special_order_is_the_reason_where_it_decides(options, reason):
    assert reason in explain(*options).words


def test_why_not_says_what_is_chosen_instead():
    words = explain(GPT, "--gpu", "h100", "--why-not", "flashinfer_cutlass").words
    assert "flashinfer_cutlass passes all checks, but triton has higher priority" in words
    (why,) = explain(GPT, "--gpu", "h100", "--json", "--why", "flashinfer_cutlass").document["why"]
    assert why["instead"] == "triton"
    assert [entry["backend"] for entry in why["why_not"]] == ["flashinfer_cutlass"]


def test_why_not_names_what_the_nearest_candidate_lacks():
    done = explain(GPT, "--gpu", "h100", "--why", "flashinfer_trtllm")
    assert "flashinfer_trtllm needs SM100-SM109; this device is SM90 what would" in done.words
    done = explain(GPT, "--gpu", "h100", "--tp", "3", "--why", "triton")
    assert "triton the number of attention heads (64) must be divisible" in done.words


def test_activations_that_the_engine_quantizes_on_request_are_an_answer():
    done = explain(GPT, "--gpu", "rtx5090", "--why", "flashinfer_cutlass")
    flag = """--quantization-config '{"moe":{"activation":"mxfp8"}}'"""
    assert f"1 quantize activations to mxfp8 ({flag})" in done.words
    with_it = explain(GPT, "--gpu", "rtx5090", "--assume", "act=mxfp8")
    assert "backend flashinfer_cutlass_afp8" in with_it.words
    assert f"run vllm serve openai/gpt-oss-20b {flag}" in with_it.words
    quark = "amd/Kimi-K2.5-MXFP4"
    # The format of a checkpoint that declares it needs no option, and other storages have none.
    assert "--quantization-config" not in explain(quark, "--gpu", "mi355x", "--tp", "8", code=1).words
    awq = explain("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", "--gpu", "h100", "--why", "cutlass", code=None)
    assert "--quantization-config" not in awq.words


def test_emulation_that_lacks_a_package_is_no_reason_to_call_the_choice_a_fallback():
    asked = ("amd/Kimi-K2.5-MXFP4", "--gpu", "h100", "--tp", "8")
    for options in ((), ("-v",)):
        done = explain(*asked, "--strict", *options)
        assert "fallback emulation" not in done.words
        note = (
            "note emulation has higher priority but needs quark, which is not installed; it would be slower"
        )
        assert note in done.words
    assert "backend emulation" in explain(*asked, "--strict", "--packages", "full,quark", code=1).words


def test_batch_invariance_is_named_by_its_variable():
    done = explain(GPT, "--gpu", "h200", "--env", "VLLM_BATCH_INVARIANT=1")
    assert "fits, but is not batch-invariant, which VLLM_BATCH_INVARIANT=1 requires" in done.words
    assert "run VLLM_BATCH_INVARIANT=1 vllm serve openai/gpt-oss-20b" in done.words


def test_without_a_backend_the_nearest_ones_are_named():
    words = explain("amd/Kimi-K2.5-MXFP4", "--gpu", "mi355x", "--tp", "8", code=1).words
    assert "because no backend of vLLM 0.33.0 supports this deployment (MXFP4 of Quark) nearest" in words
    assert "VLLM_ROCM_USE_AITER=1" in words
    refused = explain(GPT, "--gpu", "h100", "--tp", "3", code=1).words
    assert "nearest" not in refused and refused.count("must be divisible") == 1


def test_what_the_variable_rules_out_is_named():
    options = ("deepseek-v4-flash", "--gpu", "h200", "--tp", "8")
    done = explain(*options, "--env", "VLLM_BATCH_INVARIANT=1")
    assert "env VLLM_BATCH_INVARIANT=1 rules out marlin" in done.words
    assert "rules out" not in explain(*options).words


def test_shards_that_cut_across_blocks_are_a_note():
    words = explain("Qwen/Qwen3-30B-A3B-FP8", "--gpu", "h100", "--tp", "8").words
    assert "note vLLM 0.33.0 re-expands block scales to fp8 block 32x32" in words
    assert "note" not in explain(GPT, "--gpu", "h200").words


def test_variables_without_effect_are_not_in_the_command():
    done = explain(GPT, "--gpu", "h200", "--env", "VLLM_FLASHINFER_MOE_BACKEND=latency")
    assert "run vllm serve openai/gpt-oss-20b warning" in done.words
    assert "ignored: vLLM 0.33.0 ignores VLLM_FLASHINFER_MOE_BACKEND" in done.words


def test_low_latency_names_the_variable_of_the_gemm():
    done = explain(V3, "--gpu", "h200", "--dp", "16", "--ep", "--all2all", "deepep_low_latency")
    assert "backend batched_deep_gemm" in done.words
    assert (
        "needs GEMM type grouped_masked; VLLM_HUMMING_MOE_GEMM_TYPE selects grouped_contiguous" in done.words
    )


@pytest.mark.parametrize("flag", ["--lora", "--enable-lora"])
def test_adapters_are_an_option(flag):
    done = explain(GPT, "--gpu", "h100", flag)
    assert "fallback triton has higher priority and fits, but does not support LoRA adapters" in done.words
    assert "run vllm serve openai/gpt-oss-20b --enable-lora" in done.words


def test_what_expert_parallelism_changes_is_said_either_way():
    without = explain(V3, "--gpu", "h200", "--tp", "8").words
    assert "with EP flashinfer_cutlass instead of triton; 32 of 256 experts per GPU instead of 1/8" in without
    with_ep = explain(V3, "--gpu", "h200", "--tp", "8", "--ep").words
    assert "without EP triton instead of flashinfer_cutlass; 1/8 of each expert per GPU" in with_ep
    assert "the same memory; roofline at M=64" in with_ep
    assert "of experts instead of" in explain(GPT, "--gpu", "h100", "--tp", "2").words
    assert " EP " not in explain(GPT, "--gpu", "h100").words
    # Nothing is promised where there is no backend.
    assert "with EP" not in explain(GPT, "--gpu", "h100", "--tp", "3", code=1).words


def test_the_roofline_with_ep_is_of_the_most_frequent_kind_of_layer() -> None:
    """One of 40 layers is in BF16, whose weights take four times as long to read."""
    words = explain("QuantTrio/Qwen3.6-35B-A3B-AWQ", "--gpu", "h200", "--tp", "4", "--offline").words
    assert "roofline at M=64 20 us a layer instead of 19 us" in words


def test_expert_parallelism_is_named_where_it_gives_a_backend():
    words = explain("RedHatAI/Qwen3-30B-A3B-quantized.w4a16", "--gpu", "l40s", "--tp", "4", code=1).words
    assert "with EP marlin instead of none; 32 of 128 experts per GPU" in words
    assert words.count("not a multiple of the quantization group") == 1


def test_another_method_is_explained_by_the_size_that_does_not_fit():
    words = explain("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "--gpu", "l40s", "--tp", "4").words
    assert (
        "MoeWNA16Method replaces AutoGPTQMoEMethod, whose marlin has higher priority and fits this GPU, but "
        "needs an intermediate size that 128 (the group) divides; it is 192 per rank"
    ) in words


def test_a_near_name_comes_without_the_list_of_all_names():
    done = explain(GPT, "--gpu", "h100", "--backend", "flashinfer-trtlm", code=2)
    assert "Did you mean flashinfer_trtllm or" in done.stderr and "Known are" not in done.stderr
    assert "Known are aiter," in explain(GPT, "--gpu", "h100", "--backend", "xyzzy", code=2).stderr


def test_tables_mark_fused_routing_only_with_v():
    table = (GPT, "--gpu", "h100,b200")
    assert "mono" not in explain(*table).stdout
    assert "triton mono" in explain(*table, "-v").stdout
    assert "mono: routing fused in the kernel" in explain(*table, "-v").words


def test_lines_break_between_parts_not_inside_them():
    done = moectl("explain", KIMI, "--gpu", "h100", "--tp", "8", "--pp", "2", env={"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    assert lines[0].endswith("TP 8, PP 2") and lines[1].strip() == "vLLM 0.33.0"
    narrow = moectl("explain", KIMI, "--gpu", "h100", "--tp", "8", "--pp", "2", env={"COLUMNS": "100"})
    assert any(line.strip() == "--pipeline-parallel-size 2" for line in narrow.stdout.splitlines())


def test_engines_have_their_name_and_version_in_sentences():
    assert versioned("vllm-0.33.0") == "vLLM 0.33.0" and versioned("moectl") == "moectl"
    assert versioned("not registered") == "not registered"
    for options in ((GPT, "--gpu", "h100,h200"), (GPT, KIMI, "--gpu", "h100"), (GPT, "--gpu", "h100", "-v")):
        first = explain(*options).stdout
        assert "vLLM 0.33.0" in first and "vllm-0.33.0" not in first
