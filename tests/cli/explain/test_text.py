"""What a person reads: short by default, inside 80 columns, sentences instead of pairs."""

import json

import pytest

from moectl.capabilities.unpacked_libraries import LIBRARIES
from moectl.checkpoint.source.catalogue import read_entry
from moectl.oracle.checks import CHECKS, Verdict
from moectl.oracle.verdict_sentences import SENTENCES, reasons, sentence
from support.invoking import moectl

GPT, KIMI = "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking"


def explain(*options, code=0):
    return moectl("explain", *options, "--offline", code=code)


@pytest.mark.parametrize("model", [GPT, KIMI])
@pytest.mark.parametrize("columns", [80, 200])
def test_prose_stays_inside_the_terminal(model, columns):
    done = moectl("explain", model, "--gpu", "h200", "--offline", env={"COLUMNS": str(columns)})
    assert max(map(len, done.stdout.splitlines())) <= min(columns, 100)


def test_the_answer_takes_ten_lines_and_comes_before_the_reasons():
    brief = explain(GPT, "--gpu", "h200").stdout.splitlines()
    assert len(brief) <= 14 and brief[0] == f"{GPT}   1x NVIDIA H200   vLLM 0.33.0"
    labels = [line[2:9].strip() for line in brief[1:] if line[2] != " "]
    assert labels == ["backend", "because", "not", "also", "memory", "run", "more"]
    lines = explain(GPT, "--gpu", "h200", "-v").stdout.splitlines()
    places = [
        next(number for number, line in enumerate(lines) if word in line)
        for word in ("backend  triton", "run ", "because  ", "roofline ", "candidates, in priority order")
    ]
    assert places[:2] == sorted(places[:2]) and places[3:] == sorted(places[3:]) and places[1] < places[3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([GPT, "--gpu", "h200"], "backend triton (OpenAI triton_kernels), all 36 MoE layers"),
        ([GPT, "--gpu", "h200"], "not flashinfer_trtllm: needs SM100-SM109; this device is SM90"),
        ([GPT, "--gpu", "h200"], "also flashinfer_cutlass, humming, marlin (--backend NAME)"),
        (
            [GPT, "--gpu", "h200"],
            "experts 56.8 GiB + other weights 3.96 GiB (estimated from config) of 140 GiB per GPU;",
        ),
        ([GPT, "--gpu", "h100", "--tp", "2"], "run vllm serve openai/gpt-oss-120b --tensor-parallel-size 2"),
        ([KIMI, "--gpu", "h100", "--tp", "8"], "needs TP 8 or more"),
        ([GPT, "--gpu", "mi300x"], "1x AMD Instinct MI300X vLLM 0.33.0"),
        (
            [KIMI, "--gpu", "h100"],
            "does not fit: experts 532 GiB + other weights 21.8 GiB (estimated from config)",
        ),
        (
            [KIMI, "--gpu", "h100", "--dp", "16", "--ep"],
            "run vllm serve moonshotai/Kimi-K2-Thinking --data-parallel-size 16 --enable-expert-parallel",
        ),
    ],
)
def test_the_summary_says_what_to_do(options, words):
    assert words in explain(*options).words


def test_what_does_not_fit_has_no_command_to_run():
    words = explain(KIMI, "--gpu", "h200", "--backend", "marlin").words
    assert "does not fit" in words and "vllm serve" not in words


def test_layers_of_two_kinds_have_a_choice_each():
    words = explain("QuantTrio/Qwen3.6-35B-A3B-AWQ", "--gpu", "h100").words
    assert "layer 0 (bf16 weights, 16-bit activations)" in words
    assert "layers 1-39 (int4 group 128 with zero points weights, 16-bit activations)" in words


def test_layers_of_two_formats_with_one_backend_are_told_apart():
    words = explain("QuantTrio/Qwen3.6-35B-A3B-AWQ", "--gpu", "h200", "--policy", "moectl").words
    first, later = words.split("backend moectl (own Triton kernels), ")[1:]
    assert first.startswith("layer 0 (bf16 weights, 16-bit activations)") and "also torch_grouped," in first
    assert later.startswith("layers 1-39 (int4 group 128 with zero points weights, 16-bit activations)")
    assert "also moectl_marlin, torch, emulation (--backend NAME)" in later and "torch_grouped" not in later


def test_layers_of_one_format_that_fail_other_checks_elsewhere_are_told_once():
    words = explain("deepseek-ai/DeepSeek-V4-Flash", "--gpu", "h200").words
    assert "backend humming, all 43 MoE layers (mxfp4 group 32 weights, 16-bit activations)" in words


def test_other_weights_of_a_folder_are_counted(tiny_gpt_oss):
    document = explain(tiny_gpt_oss, "--gpu", "h200", "--json").document
    files = sum(path.stat().st_size for path in tiny_gpt_oss.glob("*.safetensors"))
    memory = document["memory"]
    others = document["checkpoints"][0]["other_weights"]
    assert 0 < memory["other_bytes"] < files and others["source"] == "headers"
    assert memory["other_bytes"] == sum(
        others[place] for place in ("sharded", "kv", "replicated", "first", "last")
    )
    assert memory["left_bytes"] == memory["usable_bytes"] - memory["expert_bytes"] - memory["other_bytes"]
    assert "+ other weights" in explain(tiny_gpt_oss, "--gpu", "h200").words
    assert memory["other_source"] == "headers"


def test_other_weights_of_a_config_alone_are_estimated(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(read_entry("openai/gpt-oss-120b").config))
    alone, built_in = (explain(it, "--gpu", "h200", "--json").document["memory"] for it in (config, GPT))
    assert alone["other_source"] == "config" and alone == built_in


def test_other_weights_that_are_not_known_are_said_to_be_unlisted():
    model = "deepseek-ai/DeepSeek-V4-Flash"
    words = explain(model, "--gpu", "h200", "--tp", "4").words
    assert "(other weights are not listed here)" in words and "estimated" not in words
    memory = explain(model, "--gpu", "h200", "--json").document["memory"]
    assert memory["other_bytes"] is None and memory["other_source"] is None


def test_the_smallest_tp_has_room_for_the_other_weights():
    """The experts of Qwen3-Next, 144 GiB, would leave room on two GPUs of 80 GiB, but not with the rest."""
    document = explain("Qwen/Qwen3-Next-80B-A3B-Thinking", "--gpu", "h100", "--tp", "2", "--json").document
    memory = document["memory"]
    assert memory["expert_bytes"] < memory["usable_bytes"] < memory["expert_bytes"] + memory["other_bytes"]
    assert memory["smallest_tp"] == 4


def test_other_weights_are_distributed_over_the_ranks():
    document = explain("Qwen/Qwen3-235B-A22B", "--gpu", "h200", "--tp", "8", "--json").document
    memory, weights = document["memory"], document["checkpoints"][0]["other_weights"]
    assert weights["source"] == "config" and weights["layers"] == 94 and weights["kv_heads"] == 4
    shares = weights["sharded"] // 8 + weights["kv"] // 4 + weights["replicated"]
    assert memory["other_bytes"] == shares + (weights["first"] + weights["last"]) // 8


def test_reasons_are_grouped_sentences():
    words = explain(GPT, "--gpu", "h200", "-v").words
    assert "arch needs SM100-SM109; this device is SM90" in words
    assert "package needs quark, which is not installed (pip install amd-quark)" in words
    assert "wanted" not in words
    assert "offered" not in words


def test_candidates_are_listed_when_asked_for():
    brief, whole = (explain(GPT, "--gpu", "h200", *v).words for v in ([], ["-v"]))
    assert "needs VLLM_ROCM_USE_AITER=1" not in brief
    assert "needs VLLM_ROCM_USE_AITER=1" in whole


def test_every_question_has_a_sentence():
    own = {"number formats"}
    assert {check.question for check in CHECKS} <= SENTENCES.keys() | own


def test_formats_name_what_is_offered_for_the_same_weights():
    offered = "bf16 with a16 activations; mxfp4 group 32/int4 with mxfp8 activations on sm100"
    verdict = Verdict("number formats", "scheme", "mxfp4 group 32 with a16 activations", offered, False)
    assert sentence(verdict) == (
        "supports mxfp4 group 32 only with mxfp8 activations on SM100; this setup uses 16-bit activations"
    )
    zero = Verdict(
        "number formats",
        "scheme",
        "int4 group with zero points with a16 activations",
        "int4 group/int4 group with zero points with mxfp8, int8 activations on x86 with amx",
        False,
    )
    assert sentence(zero) == (
        "supports int4 group with zero points only with mxfp8, int8 activations on x86 with amx; "
        "this setup uses 16-bit activations"
    )
    elsewhere = "fp8* with fp8 group 128 dynamic activations on sm89 or newer, rocm"
    asked = "fp8 block 32x32 with fp8 group 128 dynamic activations"
    assert sentence(Verdict("number formats", "scheme", asked, elsewhere, False)) == (
        "supports fp8 block 32x32 with fp8 group 128 dynamic activations only on SM89 or newer, rocm"
    )
    other = Verdict("number formats", "scheme", "nvfp4 group 16 with a16 activations", offered, False)
    assert sentence(other) == "does not support nvfp4 group 16"


def test_alternatives_say_once_what_they_share():
    from moectl.cli.explain.text import _alternatives

    assert _alternatives(["use b200 (sm100)", "use b300 (sm103)"]) == "use b200 (sm100) or b300 (sm103)"
    assert _alternatives(["set A=1"]) == "set A=1"
    ranks = ["use --tp 4", "use --tp 2", "use --tp 1", "spread experts"]
    assert _alternatives(ranks) == "use --tp 4, 2 or 1, or spread experts"


def test_a_question_of_a_rule_reads_without_a_row_of_its_own():
    assert sentence(Verdict("sizes", "shape", "7", "8", False)) == "sizes: needs 8; this is 7"


def test_markdown_can_be_pasted_into_an_issue():
    text = explain(GPT, "--gpu", "h200", "--md").stdout
    assert text.startswith("## openai/gpt-oss-120b, 1x NVIDIA H200, vLLM 0.33.0")
    assert "- backend: **triton (OpenAI triton_kernels), all 36 MoE layers" in text
    before, folded = text.split("<details>\n<summary>every fact and candidate</summary>")
    assert "candidates" not in before and folded.rstrip().endswith("</details>")
    assert "  - arch: needs SM100-SM109" in text
    assert "\x1b" not in text


def test_two_policies_unless_one_is_picked():
    both = explain(GPT, "--gpu", "h200", "-v")
    assert "moectl moectl (grouped_gemm, layout moectl-mtile64)" in both.words
    one = explain(GPT, "--gpu", "h200", "--policy", "vllm", "-v")
    assert "grouped_gemm" not in one.stdout
    others = explain(GPT, "--gpu", "h200", "--json").document["groups"][0]["others"]
    assert [other["policy"] for other in others] == ["moectl"]
    assert others[0]["decision"]["chosen"]["layout"] == "moectl-mtile64"


def test_another_policy_that_cannot_says_why():
    assert (
        "moectl none: moectl has no kernel for TPUs"
        in explain("qwen3-30b-a3b", "--gpu", "tpu", "-v", code=1).words
    )


def test_platforms_without_a_kernel_are_told_at_once():
    for gpu, says in (("tpu", "for TPUs"), ("out-of-tree", "engine plug-ins")):
        found = explain(GPT, "--gpu", gpu, "--policy", "moectl", "--json", code=1).document["groups"][0][
            "decision"
        ]
        assert found["chosen"] is None and found["candidates"] == [] and says in found["error"]


def test_this_tool_serves_ranks_that_gather_tokens():
    assert "moectl moectl (grouped_gemm" in explain(KIMI, "--gpu", "h200", "--dp", "8", "--ep", "-v").words


def test_memory_while_loading_counts_the_copies_of_the_largest_layer():
    document = explain(KIMI, "--gpu", "a100", "--tp", "8", "--json").document
    memory = document["groups"][0]["memory"]
    assert memory["repacking_bytes"] == 2 * memory["padded_bytes_per_layer"]
    assert document["loading_bytes"] == document["expert_bytes"] + memory["repacking_bytes"]


def test_roofline_of_decode_and_prefill():
    roofline = explain(GPT, "--gpu", "h200", "--json").document["groups"][0]["roofline"]
    one, _, many = roofline["decode"]
    assert one["experts"] == pytest.approx(4)
    # Four experts' bytes at 4.8 TB/s.
    expert = 3 * 2880 * 2880 // 2 + 3 * 2880 * 90 + 2 * 3 * 2880
    assert one["us"] == pytest.approx((4 * expert + 2 * 2880 * 2) / 4.8e12 * 1e6, rel=1e-6)
    assert many["bound"] == "memory" and roofline["prefill"]["bound"] == "compute"
    assert explain(GPT, "--gpu", "gb10", "--json").document["groups"][0]["roofline"]["prefill"]["us"] is None
    assert "prefill: unknown" in explain(GPT, "--gpu", "gb10", "-v").words


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([GPT, "--gpu", "h200"], 0),
        ([GPT, "--gpu", "h200", "--backend", "marlin"], 0),
        ([GPT, "--gpu", "h200", "--packages", "bare"], 1),
        ([KIMI, "--gpu", "b200"], 1),
        ([KIMI, "--gpu", "b200", "--env", "VLLM_USE_FLASHINFER_MOE_INT4=1"], 0),
        ([KIMI, "--gpu", "h100", "--backend", "flashinfer_trtllm", "--allow-fallback"], 1),
        ([GPT, "--gpu", "mi355x", "--backend", "emulation", "--packages", "quark"], 0),
        (["Qwen/Qwen3-30B-A3B-GPTQ-Int4", "--gpu", "l40s", "--tp", "2"], 0),
        (["Qwen/Qwen3-30B-A3B-GPTQ-Int4", "--gpu", "l40s", "--tp", "4"], 1),
        (["Qwen/Qwen3-30B-A3B-GPTQ-Int4", "--gpu", "l40s", "--tp", "4", "--ep"], 0),
        # Without Marlin on the platform, the other method is no worse.
        (["Qwen/Qwen3-30B-A3B-GPTQ-Int4", "--gpu", "mi300x", "--tp", "4"], 0),
    ],
)
def test_strict_finds_fallbacks(options, code):
    explain(*options, "--strict", code=code)
    explain(*options)


def test_every_name_that_can_be_asked_for_gets_an_answer():
    from moectl.oracle import policy_named

    for name in policy_named().request_names():
        done = explain(GPT, "--gpu", "h200", "--backend", name, "--allow-fallback", "--json")
        chosen = done.document["groups"][0]["decision"]["chosen"]["backend"]
        fallback = done.document["groups"][0]["fallback"]
        assert (fallback == "request") == (
            name != "auto" and chosen not in policy_named().requested_backends(name)
        )


def test_a_request_that_is_served_is_the_reason():
    words = explain(GPT, "--gpu", "h200", "--backend", "marlin", "--allow-fallback").words
    assert "because requested by name" in words


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--assume", "intermediate=3072"], ("dims", {"intermediate": 3072})),
        (["--assume", "hidden=4096"], ("dims", {"hidden": 4096})),
        (["--assume", "dtype=bf16"], ("dtype", "bf16")),
        (["--assume", "act=mxfp8"], ("scheme", {"act": {"name": "mxfp8"}})),
    ],
)
def test_assumptions_are_said_to_be_assumed(options, value):
    group = explain(GPT, "--gpu", "a100", "--json", *options).document["groups"][0]
    field, wanted = value

    def holds(found, wanted):
        if isinstance(wanted, dict):
            return all(holds(found[key], inner) for key, inner in wanted.items())
        return found == wanted

    assert holds(group["decision"]["inputs"]["problem"][field], wanted)
    assert "assumed" in group["sources"].values()


def test_token_scales_that_are_powers_of_two_are_a_fact():
    def fact(name, *options):
        listed = explain(name, "--gpu", "h200", "--json", *options).document["groups"][0]["facts"]
        return next((it for it in listed if it["fact"] == "token_scales"), None)

    stated = fact("deepseek-ai/DeepSeek-V3.1")
    assert stated["value"] == "powers of two, rounded up"
    assert stated["source"] == "config:quantization_config.scale_fmt"
    assert fact("deepseek-ai/DeepSeek-V3.1", "--assume", "token_scales=fp32") is None
    assert fact("deepseek-ai/DeepSeek-V3") is None
    assert fact("deepseek-ai/DeepSeek-V3", "--assume", "token_scales=ue8m0")["source"] == "assumed"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--assume", "size=3"], "--assume does not support 'size'"),
        (["--assume", "hidden=x"], "--assume hidden takes a positive number"),
        (["--assume", "act=fp3"], "--assume act takes one of"),
        (["--assume", "token_scales=ue8m0"], "needs FP8 tokens with dynamic scales, got a16 activations"),
        (["--assume", "token_scales=e8"], "--assume token_scales takes one of fp32, ue8m0"),
        (["--tp", "0"], "--tp takes numbers from 1 to 65536"),
        (["--tp", "99999999999999"], "--tp takes numbers from 1 to 65536"),
        (["--tp", "1,x"], "--tp takes numbers from 1 to 65536"),
        (["--why", "marlni"], "Did you mean marlin"),
        (["--gpu", "h200,h2000"], "h2000"),
        (["--gpu", "h100,h200", "--why", "marlin"], "--why takes one checkpoint, one GPU"),
        (["--diff", "/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_wrong_usage_says_what_is_right(options, words):
    assert words in " ".join(explain(GPT, *options, code=2).stderr.split())


def test_no_checkpoint_is_wrong_usage():
    assert "CKPT is missing" in moectl("explain", code=2).stderr


def test_help_fits_a_screen():
    done = moectl("explain", "--help", env={"COLUMNS": "100"})
    lines = done.stdout.splitlines()
    assert len(lines) <= 60
    assert sum(line.strip().startswith("moectl explain ") for line in lines) >= 3


@pytest.mark.parametrize(("typed", "offered"), [("h20", "h200"), ("h100,mi3", "h100,mi300x"), ("al", "all")])
def test_names_complete_behind_a_comma_too(typed, offered):
    from moectl.cli.explain.options import completed, gpu_names

    assert offered in completed(gpu_names)(typed)


def test_reasons_say_equal_things_once():
    from moectl.checkpoint import open_checkpoint
    from moectl.environment import find_device
    from moectl.oracle import policy_named, select
    from moectl.oracle.machine_packages import packages_from

    problem = open_checkpoint(KIMI, offline=True).groups[0].problem
    decision = select(problem, find_device("h200"), packages_from("none"), policy_named())
    for candidate in decision.candidates:
        found = reasons(candidate)
        assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--gpu", "mi300x"],
            "fallback aiter_triton_mxfp4_bf16 has higher priority and fits, but needs VLLM_ROCM",
        ),
        (
            ["--gpu", "h200", "--backend", "flashinfer_trtllm", "--allow-fallback"],
            "trtllm was requested, but needs SM100",
        ),
        (
            ["--gpu", "h200", "--backend", "emulation", "--packages", "full,quark"],
            "requested by name; all checks pass",
        ),
    ],
)
def test_a_fallback_is_told_with_its_reason(options, words):
    assert words in explain(GPT, *options).words


def test_a_request_that_cannot_be_served_says_what_its_nearest_class_lacks():
    words = explain(GPT, "--gpu", "h200", "--backend", "flashinfer_trtllm", code=1).words
    assert "because flashinfer_trtllm was requested by name, but it needs SM100-SM109" in words


def test_values_of_one_layer_group_stand_in_one_column():
    lines = explain(GPT, "--gpu", "h200", "-v").stdout.partition("\nlayers ")[2].splitlines()
    places = {
        line.index(word)
        for line in lines
        for word in (" triton", " Humming has")
        if line[2:8] in ("backen", "moectl", "note  ") and word in line
    }
    assert len(places) == 1


def test_names_that_begin_as_typed_are_meant_first():
    done = explain(GPT, "--gpu", "h200", "--dp", "8", "--ep", "--all2all", "deepep", code=2)
    assert "Did you mean deepep_high_throughput or deepep_low_latency or deepep_v2?" in done.stderr


@pytest.mark.parametrize("name", ["8xh200", "h200x8", "h200:8", "8 * H200", "NVIDIA H200 x 8"])
def test_a_count_of_gpus_is_sent_to_the_ranks(name):
    assert "Use --gpu h200 --tp 8, or --dp 8 --ep." in explain(GPT, "--gpu", name, code=2).stderr


def test_a_count_of_unknown_gpus_says_which_are_known():
    assert "Near matches" in explain(GPT, "--gpu", "8xh201", code=2).stderr


def test_an_engine_without_rules_is_told_whose_rules_there_are():
    for name in ("lmdeploy", "vllm-0.29.0"):
        said = explain(GPT, "--gpu", "h200", "--policy", name, code=2).stderr
        assert f"no rules for {name!r}" in said and "those of vLLM 0.19.0 to 0.33.0" in said
        assert "Name one of them, or --engine all" in said
    assert "Did you mean --engine vllm?" in explain(GPT, "--gpu", "h200", "--policy", "vlm", code=2).stderr
    assert explain(GPT, "--gpu", "h200", "--policy", "VLLM_0.33.0", "-q").stdout


def test_a_missing_tuned_file_is_in_the_short_answer():
    def rows(*words):
        return " ".join(explain(*words).stdout.split())

    untuned = rows("Qwen/Qwen3-30B-A3B", "--gpu", "h100-pcie", "--tp", "2")
    assert "tuned no file for this GPU and shape: vLLM warns" in untuned
    assert "moectl tune --to vllm writes one" in untuned
    assert " tuned " not in rows("Qwen/Qwen3-30B-A3B", "--gpu", "h100", "--tp", "2")
    assert " tuned " not in rows(GPT, "--gpu", "h100")


def test_a_platform_without_rules_is_out_of_scope():
    done = explain(GPT, "--gpu", "tpu", code=1)
    assert "do not cover TPUs" in done.stderr
    assert "Ask about CPUs or NVIDIA GPUs or AMD GPUs or Intel GPUs with --gpu" in done.stderr


def test_a_backend_that_was_never_run_on_such_a_device_is_told_so():
    own = ("--policy", "moectl", "--packages", "flashinfer")
    on_blackwell = explain(GPT, "--gpu", "b200", "-v", *own).words
    assert "16-bit activations), not verified on hardware" in on_blackwell
    assert "flashinfer_trtllm (ids and weights), not verified on hardware" in on_blackwell
    on_hopper = explain(GPT, "--gpu", "h200", "-v", *own).words
    assert "backend moectl, verified on SM90 because" in on_hopper
    assert "torch (torch), not verified" not in on_hopper
    # Another engine runs its backends itself: this tool says nothing of them.
    assert "verified" not in explain(GPT, "--gpu", "b200").words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([GPT, "--gpu", "h200"], "16-bit activations), verified on SM90 because"),
        ([GPT, "--gpu", "a100"], "16-bit activations), not verified on hardware other than SM90 because"),
        ([GPT, "--gpu", "cpu"], "16-bit activations), verified on SM90 and CPUs because"),
        (
            ["MiniMaxAI/MiniMax-M3-MXFP8", "--gpu", "h200", "--backend", "humming", "--packages", "full"],
            "mxfp8 dynamic activations), verified on SM90 because",
        ),
    ],
)
def test_where_the_chosen_backend_was_verified_is_said(options, words):
    assert words in explain(*options, "--policy", "moectl").words


def test_what_flashinfers_kernels_lack_is_said_in_its_own_sentence():
    said = "its bf16 x a16 kernels add no biases"
    assert sentence(Verdict("bias in FlashInfer", "scheme", said, "what its kernels compute", False)) == said


@pytest.mark.parametrize("backend", LIBRARIES)
def test_what_can_be_fetched_is_said_where_it_is_missing(backend):
    asked = (GPT, "--gpu", "h200", "--policy", "moectl", "--packages", "bare", "--backend", backend)
    assert f"none of which is available (moectl peers {backend})" in explain(*asked, code=None).words


def test_why_not_asks_the_same():
    asked = (KIMI, "--gpu", "b200", "--tp", "8")
    assert (
        explain(*asked, "--why-not", "flashinfer_trtllm").stdout
        == explain(*asked, "--why", "flashinfer_trtllm").stdout
    )


@pytest.mark.parametrize("option", ["--moe-backend", "--why"])
@pytest.mark.parametrize(
    ("policy", "typed", "says"),
    [
        ("moectl", "flashinfer-b12x", "backend 'flashinfer-b12x' is vLLM's, not moectl's"),
        ("vllm", "moectl_marlin", "backend 'moectl_marlin' is moectl's, not vLLM's"),
    ],
)
def test_another_engines_backend_is_told_from_an_unknown_one(option, policy, typed, says):
    done = explain(GPT, "--gpu", "h200", "--policy", policy, option, typed, code=2)
    assert says in " ".join(done.stderr.split())
