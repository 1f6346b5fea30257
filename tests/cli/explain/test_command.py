"""`moectl explain` from the command line."""

import json

import pytest

from support.invoking import moectl

GPT, KIMI = "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking"


def ask(model, *options, code=0):
    return moectl("explain", model, "--offline", "--json", *options, code=code).document


@pytest.mark.parametrize(
    ("model", "options", "experts", "monolithic", "padded"),
    [
        (GPT, ["--gpu", "h200"], "OAITritonMxfp4ExpertsMonolithic", True, (2880, 2880)),
        (GPT, ["--gpu", "h200", "--packages", "bare"], "MarlinExperts", False, (3072, 2944)),
        (GPT, ["--gpu", "sm80"], "MarlinExperts", False, (3072, 2944)),
        (GPT, ["--gpu", "b200"], "TrtLlmMxfp4ExpertsMonolithic", True, (3072, 2944)),
        (KIMI, ["--gpu", "h100", "--tp", "8"], "HummingIndexedExperts", False, (7168, 256)),
        (KIMI, ["--gpu", "a100"], "MarlinExperts", False, (7168, 2048)),
        (
            KIMI,
            ["--gpu", "b200", "--env", "VLLM_USE_FLASHINFER_MOE_INT4=1"],
            "TrtLlmMxint4ExpertsMonolithic",
            True,
            (7168, 2048),
        ),
        (
            KIMI,
            ["--gpu", "h100", "-dp", "8", "-ep", "--all2all", "deepep_low_latency"],
            "BatchedMarlinExperts",
            False,
            (7168, 2048),
        ),
    ],
)
def test_winners(model, options, experts, monolithic, padded):
    document = ask(model, *options)
    decision = document["groups"][0]["decision"]
    chosen = decision["chosen"]
    assert (chosen["experts"], chosen["monolithic"]) == (experts, monolithic)
    dims = decision["inputs"]["problem"]["dims"]
    assert (dims["padded_hidden"], dims["padded_intermediate"]) == padded
    assert document["checkpoints"][0]["source"] == "catalogue"
    for candidate in decision["candidates"]:
        assert candidate["usable"] == (not candidate["reasons"]) or candidate["assigned"]
        assert set(candidate["reasons"]) <= {"arch", "package", "scheme", "shape", "parallel", "policy"}


def test_the_document_holds_enough_to_decide_again():
    from moectl.oracle import decide, replay_inputs

    decision = ask(GPT, "--gpu", "h200", "--tp", "2")["groups"][0]["decision"]
    again = decide(replay_inputs(decision))
    assert json.loads(json.dumps(again.to_json())) == decision


def test_a_backend_that_cannot_serve_is_refused_with_its_reasons():
    done = moectl("explain", GPT, "--gpu", "h100", "--backend", "deep_gemm", "--offline", code=1)
    assert "backend  none for all 36 MoE layers" in done.stdout
    done = moectl("explain", GPT, "--gpu", "h100", "--backend", "FLASHINFER-TRTLLM", "--offline", code=1)
    assert "SM100" in done.stdout
    fallen = ask(GPT, "--gpu", "h100", "--backend", "flashinfer_trtllm", "--allow-fallback")
    assert fallen["groups"][0]["decision"]["chosen"]["experts"] == "OAITritonMxfp4ExpertsMonolithic"
    assert any("flashinfer_trtllm" in note for note in fallen["groups"][0]["decision"]["notes"])


def test_every_request_of_the_grid_can_be_asked():
    from moectl.oracle import policy_named
    from moectl.oracle.engines.vllm_0_33_0.data import GRID

    forced = json.loads(GRID.read_text())["FORCED"]
    asked = {name for _, names in forced.values() for name in names}
    assert asked <= set(policy_named().request_names())
    done = moectl("explain", GPT, "--gpu", "b200", "--backend", "flashinfer_trtllm_afp8", "--offline", code=1)
    assert "does not accept flashinfer_trtllm_afp8" in done.stdout


def test_memory_as_stored_and_padded():
    memory = ask(GPT, "--gpu", "sm80")["groups"][0]["memory"]
    stored = 128 * (3 * 2880 * 2880 // 2 + 3 * 2880 * 90 + 2 * 3 * 2880)
    padded = 128 * (3 * 3072 * 2944 // 2 + 2 * 2944 * 96 + 3072 * 92 + 2 * (2 * 2944 + 3072))
    assert memory["stored_bytes_per_layer"] == stored
    assert memory["padded_bytes_per_layer"] == padded
    assert memory["stored_bytes"] == 36 * stored


def test_verbose_says_where_facts_come_from():
    brief, text = (moectl("explain", KIMI, "--gpu", "h100", "--offline", *v).stdout for v in ([], ["-v"]))
    assert "config:moe_intermediate_size" not in brief
    assert "config:moe_intermediate_size" in text
    for shown in ("read from: catalogue", "layers 1-60 (60): 384 experts", "HummingIndexedExperts"):
        assert shown in text and shown not in brief


def test_quiet_is_one_line_a_group():
    assert moectl("explain", KIMI, "--gpu", "h100", "--offline", "-q").stdout == "1-60\thumming\n"


def test_the_policy_of_this_tool():
    chosen = ask(GPT, "--gpu", "cpu", "--policy", "moectl")["groups"][0]["decision"]["chosen"]
    assert chosen["runner"] == "torch"
    chosen = ask(KIMI, "--gpu", "h200", "--policy", "moectl")["groups"][0]["decision"]["chosen"]
    assert (chosen["runner"], chosen["layout"]) == ("moectl", "moectl-mtile64")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "h2000"], "h200"),
        (["--tp", "7"], "7 tensor-parallel"),
        (["--env", "VLLM_USE_DEEP_GEMM"], "K=V"),
        (["--packages", "flashinfr"], "flashinfer"),
        (["--policy", "vllm-9"], "vLLM 0.19.0 to 0.33.0"),
    ],
)
def test_wrong_usage_names_what_is_right(options, words):
    done = moectl("explain", GPT, "--offline", *options, code=2)
    assert words in done.stderr


def test_a_converted_folder_says_which_commands_read_it(tiny_gpt_oss, tmp_path):
    moectl("convert", tiny_gpt_oss, tmp_path / "out", "--to", "moectl")
    done = moectl("explain", tmp_path / "out", code=4)
    assert "moectl run" in done.stderr


def test_debug_shows_the_traceback_and_keeps_the_exit_code():
    done = moectl("explain", GPT, "--gpu", "h2000", "--debug", code=2)
    assert "Traceback" in done.stderr
    assert "moectl: error:" in done.stderr


@pytest.mark.parametrize(
    ("options", "near"),
    [
        (["--backend", "marlni"], "marlin"),
        (["--backend", "marlni", "--allow-fallback"], "marlin"),
        (["--dp", "8", "--ep", "--all2all", "deepep_low_latncy"], "deepep_low_latency"),
    ],
)
def test_a_name_that_the_engine_does_not_know_is_wrong_usage(options, near):
    done = moectl("explain", GPT, "--gpu", "h100", "--offline", *options, code=2)
    assert f"Did you mean {near}" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--env", "VLLM_USE_FLASHINFER_MOE_INT=1"], "VLLM_USE_FLASHINFER_MOE_INT4"),
        (["--all2all", "deepep_low_latency"], "has no effect"),
    ],
)
def test_options_that_change_nothing_are_noted(options, words):
    assert words in moectl("explain", KIMI, "--gpu", "b200", "--offline", *options).stderr


def test_memory_is_held_against_the_device():
    assert ask(KIMI, "--gpu", "l40s")["fits"] is False
    assert ask(GPT, "--gpu", "h200")["fits"] is True
    assert "does not fit" in moectl("explain", KIMI, "--gpu", "l40s", "--offline").stdout


def test_more_ranks_than_experts_are_refused():
    done = moectl("explain", GPT, "--gpu", "h100", "--tp", "256", "--ep", "--offline", code=2)
    assert "128 experts cannot be spread over 256 ranks" in done.stderr


def test_a_deployment_that_the_engine_refuses_names_no_backend_as_chosen():
    done = moectl("explain", GPT, "--gpu", "t4", "--offline", code=1)
    assert [line for line in done.stdout.splitlines() if line.startswith("  backend ")] == [
        "  backend  none for all 36 MoE layers (mxfp4 group 32 weights, 16-bit"
    ]


def test_two_spellings_of_one_option_with_different_values_are_refused():
    ask = ("explain", "openai/gpt-oss-120b", "--gpu", "h200", "--offline", "--engine", "vllm")
    done = moectl(*ask, "--policy", "moectl", code=2)
    assert "--engine 'vllm' and --policy 'moectl' are one option with different values" in done.stderr
    assert moectl(*ask, "--policy", "vllm").stdout == moectl(*ask).stdout
    assert moectl(*ask, "--engine", "moectl", "--quiet").stdout == "0-35\tmoectl\n"


def test_a_format_without_rules_is_no_wrong_usage(tmp_path):
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = moectl("explain", tmp_path / "config.json", "--gpu", "tpu", code=1)
    assert "do not cover TPUs with native MXFP4" in done.stderr
