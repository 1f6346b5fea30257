"""Deployments on the command line: refused ones, pipeline stages, spellings of expert parallelism."""

import pytest

from support.invoking import moectl

GPT, KIMI = "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking"


def explain(*options, code=0):
    return moectl("explain", *options, "--gpu", "h100", "--offline", code=code)


@pytest.mark.parametrize("tp", [3, 5, 6, 24])
def test_a_deployment_that_the_engine_refuses_is_refused(tp):
    done = explain(GPT, "--tp", str(tp), code=1)
    assert f"(64) must be divisible by the tensor parallel size ({tp})" in done.words
    assert explain(GPT, "--tp", str(tp), "-q", code=1).stdout == "0-35\tnone\n"


def test_a_refused_column_of_a_table_has_a_footnote():
    words = explain(GPT, "--tp", "2,3").words
    assert "none [1]" in words and "[1] the number of attention heads (64) must be divisible" in words


def test_why_leads_from_a_refused_deployment_to_an_accepted_one():
    document = explain(GPT, "--tp", "3", "--json", "--why", "triton").document
    options = [
        option for change in document["why"][0]["answers"][0]["changes"] for option in change["options"]
    ]
    assert ["--tp", "4"] in options


def test_a_replayed_document_is_refused_again(tmp_path):
    path = tmp_path / "refused.json"
    path.write_text(explain(GPT, "--tp", "3", "--json", code=1).stdout)
    assert "must be divisible" in moectl("explain", "--replay", str(path), code=1).words


def test_a_stage_holds_its_layers_only():
    whole, halves = (explain(KIMI, "--tp", "8", "--pp", pp, "--json").document for pp in ("1", "2"))
    layer = whole["groups"][0]["memory"]["padded_bytes_per_layer"]
    # Layer 0 is dense: it is one of the first stage's 31.
    assert whole["expert_bytes"] == 60 * layer and halves["expert_bytes"] == 30 * layer
    assert whole["stages"] == [[0, 60]] and halves["stages"] == [[0, 30], [31, 60]]
    assert halves["parallel"]["pp"] == 2
    words = explain(KIMI, "--tp", "8", "--pp", "2", "-v").words
    assert "parallel TP 8, PP 2" in words and "stages layers 0-30, layers 31-60" in words


def test_two_nodes_are_told_in_the_first_lines():
    done = explain(KIMI, "--tp", "8", "--pp", "2")
    assert "16x NVIDIA H100 80GB HBM3, TP 8, PP 2" in done.words
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2" in done.words
    whole, half = (explain(KIMI, "--tp", "8", "--pp", pp, "--json").document["memory"] for pp in "12")
    assert half["expert_bytes"] * 2 == whole["expert_bytes"]
    assert (whole["smallest_tp"], half["smallest_tp"]) == (8, 4)


def test_the_smallest_tensor_parallel_size_is_one_that_the_engine_accepts():
    # 40 attention heads: from TP 8 on, there is none.
    options = ["meta-llama/Llama-4-Maverick-17B-128E-Instruct", "--json"]
    assert explain(*options, "--tp", "8").document["memory"]["smallest_tp"] is None


def test_stages_are_columns_of_a_table():
    done = explain(KIMI, "--tp", "8", "--pp", "1,2", "--json")
    one, two = done.document["rows"]
    assert (one["pp"], two["pp"]) == (1, 2) and one["fits"] == two["fits"]
    assert "TP 8 PP 2" in explain(KIMI, "--tp", "8", "--pp", "1,2").words


def test_there_are_no_more_stages_than_layers():
    done = explain(KIMI, "--pp", "62", code=2)
    assert "61 layers cannot be distributed over 62 pipeline stages" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--ep", "8"],
        ["--ep=8"],
        ["--ep-size", "8"],
        ["--tp", "8", "--ep", "8"],
        ["--tp", "4", "--dp", "2", "-ep", "8"],
        ["--tp", "8", "--ep"],
    ],
)
def test_spellings_of_eight_expert_parallel_ranks(options):
    done = explain(GPT, *options, "--json")
    parallel = done.document["parallel"]
    assert parallel["ep"] and parallel["tp"] * parallel["dp"] == 8
    assert ("is taken as --tp 8 --ep" in done.stderr) == (len(options) < 3)


@pytest.mark.parametrize("options", [["--ep", "1"], ["--tp", "2", "--ep-size", "1"]])
def test_one_expert_parallel_rank_is_none(options):
    assert not explain(GPT, *options, "--json").document["parallel"]["ep"]


def test_another_number_of_expert_parallel_ranks_says_what_to_type():
    done = explain(GPT, "--tp", "4", "--ep", "8", code=2)
    assert "distributes experts over all tp x dp ranks, 4 x 1 here, not over 8" in done.stderr
    assert "Use --ep without a number" in done.stderr


@pytest.mark.parametrize("stages", ["40,21", " 40 , 21"])
def test_stages_are_those_of_the_variable(stages):
    done = explain(KIMI, "--tp", "16", "--pp", "2", "--env", f"VLLM_PP_LAYER_PARTITION={stages}", "--json")
    even = explain(KIMI, "--tp", "16", "--pp", "2", "--json").document
    layer = even["groups"][0]["memory"]["padded_bytes_per_layer"]
    assert done.document["stages"] == [[0, 39], [40, 60]] and even["stages"] == [[0, 30], [31, 60]]
    assert done.document["expert_bytes"] == 39 * layer and even["expert_bytes"] == 30 * layer
    assert done.document["memory"]["other_bytes"] > even["memory"]["other_bytes"]


def test_stages_of_this_process_count_for_the_machine_itself(tmp_path):
    options = ["explain", KIMI, "--tp", "16", "--pp", "2", "--offline", "--json"]
    done = moectl(*options, env={"VLLM_PP_LAYER_PARTITION": "40,20"}, code=1)
    assert "sum(partitions)=60 does not match num_hidden_layers=61" in done.stdout


@pytest.mark.parametrize(
    ("pp", "stages", "reason"),
    [
        ("2", "40,20", "sum(partitions)=60 does not match num_hidden_layers=61"),
        ("2", "61", "len(partitions)=1 does not match pp_size=2"),
        ("1", "31,30", "len(partitions)=2 does not match pp_size=1"),
        ("2", "30;31", "invalid partition string: '30;31'"),
        ("2", "", "invalid partition string: ''"),
    ],
)
def test_stages_that_the_engine_refuses_are_refused(pp, stages, reason):
    options = [KIMI, "--tp", "16", "--pp", pp, "--env", f"VLLM_PP_LAYER_PARTITION={stages}"]
    done = explain(*options, code=1)
    assert f"VLLM_PP_LAYER_PARTITION: {reason}" in done.words


def test_a_stage_may_be_empty():
    options = [KIMI, "--tp", "16", "--pp", "2", "--env", "VLLM_PP_LAYER_PARTITION=0,61"]
    assert explain(*options, "--json").document["stages"] == [[], [0, 60]]
    assert "stages no layers, layers 0-60" in explain(*options, "-v").words


@pytest.mark.parametrize(
    ("model", "tp", "matrix", "size"),
    [
        ("deepseek-ai/DeepSeek-V3", "32", "layers.0.mlp.down_proj", 576),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "8", "layers.0.mlp.shared_expert.down_proj", 64),
        ("zai-org/GLM-5-FP8", "32", "layers.3.mlp.shared_experts.down_proj", 64),
        ("deepseek-ai/DeepSeek-V3", "64", "layers.0.mlp.down_proj", 288),
    ],
)
def test_blocks_outside_the_experts_are_not_cut(model, tp, matrix, size):
    reason = f"{matrix}: weight input_size_per_partition = {size} is not divisible by weight quantization"
    assert f"{reason} block_k = 128" in explain(model, "--tp", tp, code=1).words
    assert reason in explain(model, "--tp", tp, "--ep", code=1).words


def test_blocks_of_whole_ranks_and_of_sequence_parallel_shared_experts_are_not_cut():
    model = "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8"
    explain(model, "--tp", "4")
    explain(model, "--tp", "8", "--dp", "2", "--ep")
    assert explain("Qwen/Qwen3-Next-80B-A3B-Thinking", "--tp", "8").words.count("triton")


def test_a_refused_tensor_parallel_size_is_not_offered():
    """Qwen3-Next in FP8 would fit eight GPUs of 16 GiB, over which its shared expert cannot be sharded."""
    options = ["explain", "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "--gpu", "rtx5080", "--offline", "--json"]
    memory = moectl(*options).document["memory"]
    weights = memory["expert_bytes"] + memory["other_bytes"]
    assert weights / 8 < memory["usable_bytes"] < weights / 4 and memory["smallest_tp"] is None
