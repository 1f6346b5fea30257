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
