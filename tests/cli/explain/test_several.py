"""Several checkpoints in one call."""

import json

import pytest

from support.invoking import moectl

GPT, KIMI, MIXED = "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking", "QuantTrio/Qwen3.6-35B-A3B-AWQ"


def explain(*options, code=0):
    return moectl("explain", *options, "--offline", code=code)


def test_one_gpu_and_deployment_is_a_row_for_each_checkpoint():
    done = explain(GPT, MIXED, "--gpu", "h200", "--tp", "8")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.stdout.splitlines()[0] == "2 checkpoints   h200, TP 8   vLLM 0.33.0"
    assert lines[1] == ["checkpoint", "layers", "backend", "experts/GPU", "fits"]
    assert lines[2] == [GPT, "all", "triton", "[1]", "7.6", "GiB", "yes"]
    assert lines[3] == [MIXED, "0", "triton", "2.11", "GiB", "yes"]
    assert lines[4] == [MIXED, "1-39", "humming", "[2]", "2.11", "GiB", "yes"]
    assert "[1] flashinfer_trtllm has higher priority, but needs SM100-SM109" in done.words


def test_every_answer_is_that_of_the_checkpoint_alone():
    rows = explain(GPT, KIMI, MIXED, "--gpu", "h100,b200", "--tp", "2,8", "--json").document["rows"]
    assert len(rows) == 4 + 4 + 8
    for name in (GPT, KIMI, MIXED):
        alone = explain(name, "--gpu", "h100,b200", "--tp", "2,8", "--json").document["rows"]
        assert alone == [row for row in rows if row["checkpoint"] == name]


def test_gpus_and_deployments_are_columns():
    lines = explain(GPT, KIMI, "--gpu", "h100", "--tp", "1,8").stdout.splitlines()
    assert lines[0] == "2 checkpoints   h100   vLLM 0.33.0"
    assert lines[1].split() == ["checkpoint", "TP", "1", "TP", "8"]
    assert lines[3].split() == [KIMI, "humming", "!", "humming"]
    lines = explain(GPT, KIMI, "--gpu", "h100,b200").stdout.splitlines()
    assert lines[1].split() == ["checkpoint", "h100", "b200"]


def test_what_does_not_fit_is_a_list_with_equal_answers_merged():
    done = explain(GPT, KIMI, "--gpu", "h100,b200,h200,a100", "--tp", "4,8")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "humming ! h100 TP 4, h200 TP 4 humming h100 TP 8, h200 TP 8 marlin [1] b200 TP 4" in done.words


def test_markdown_is_a_table():
    text = explain(GPT, KIMI, "--gpu", "h100", "--md").stdout
    assert "| checkpoint | backend | experts/GPU | fits |" in text
    assert f"| {GPT} |" in text.replace("\\", "")


def test_quiet_is_a_line_for_each_group_of_layers():
    assert explain(GPT, MIXED, "--gpu", "h200", "-q").stdout.splitlines() == [
        f"{GPT}\t0-35\ttriton",
        f"{MIXED}\t0\ttriton",
        f"{MIXED}\t1-39\thumming",
    ]
    lines = explain(GPT, KIMI, "--gpu", "h200", "--tp", "1,2", "-q").stdout.splitlines()
    assert lines[0] == f"{GPT}\th200\tTP 1\t0-35\ttriton"
    assert len(lines) == 4


def test_the_rest_is_answered_if_one_cannot_be_opened(tmp_path):
    missing = "nobody/no-such-model"
    done = explain(GPT, missing, tmp_path, "--gpu", "h200", code=4)
    assert "openai/gpt-oss-120b  triton" in done.stdout
    assert done.stderr.count("moectl: error:") == 2
    document = explain(GPT, missing, tmp_path, "--gpu", "h200", "--json", code=4).document
    assert [error["checkpoint"] for error in document["errors"]] == [missing, str(tmp_path)]
    assert all(error["what"] and error["exit_code"] for error in document["errors"])
    assert [entry["name"] for entry in document["checkpoints"]] == [GPT]
    assert document["usable"] is False


def test_nothing_can_be_opened(tmp_path):
    (tmp_path / "other").mkdir()
    document = explain(tmp_path, tmp_path / "other", "--gpu", "h200", "--json", code=4).document
    assert (len(document["errors"]), document["rows"]) == (2, [])


def test_one_checkpoint_by_two_names_is_one_row():
    done = explain(GPT, "gpt-oss-120b", "--gpu", "h200")
    assert done.stdout.startswith("1 checkpoint ")
    assert "gpt-oss-120b and openai/gpt-oss-120b are the same checkpoint" in done.stderr


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--gpu", "h200"], 0),
        (["--gpu", "t4"], 1),
        (["--gpu", "t4,h200"], 0),
        (["--gpu", "t4,h200", "--strict"], 1),
        (["--gpu", "h200", "--tp", "3"], 1),
    ],
)
def test_exit_codes(options, code):
    explain(GPT, KIMI, *options, code=code)


@pytest.mark.parametrize("option", ["--why", "--diff"])
def test_why_and_diff_take_one_checkpoint(option, tmp_path):
    value = "marlin" if option == "--why" else tmp_path / "old.json"
    done = explain(GPT, KIMI, "--gpu", "h200", option, value, code=2)
    assert f"{option} takes one checkpoint, one GPU and one deployment" in done.stderr


def test_replay_takes_no_checkpoints(tmp_path):
    done = moectl("explain", GPT, KIMI, "--replay", tmp_path / "old.json", code=2)
    assert "Omit CKPT" in done.stderr


def test_checkpoints_count_as_cells():
    ranks = ",".join(str(n) for n in range(1, 1001))
    assert "this has 3000" in explain(GPT, KIMI, MIXED, "--gpu", "h200", "--tp", ranks, code=2).stderr


@pytest.mark.parametrize("options", [["--gpu", "h200"], ["--gpu", "h200,t4", "--tp", "1,3"]])
def test_a_document_of_several_is_decided_again(tmp_path, options):
    document = explain(GPT, MIXED, *options, "--json").document
    path = tmp_path / "several.json"
    path.write_text(json.dumps(document))
    assert moectl("explain", "--replay", path, "--json").document == document
    assert moectl("explain", "--replay", path).stdout == explain(GPT, MIXED, *options).stdout
    assert "need a document of one" in moectl("explain", "--replay", path, "--why", "marlin", code=2).stderr


def test_rows_that_are_not_a_whole_table_are_refused(tmp_path):
    document = explain(GPT, MIXED, "--gpu", "h200,t4", "--json").document
    path = tmp_path / "part.json"
    path.write_text(json.dumps({**document, "rows": document["rows"][:-1]}))
    assert f"does not have {MIXED} in every deployment" in moectl("explain", "--replay", path, code=2).stderr
    stray = [{**document["rows"][0], "checkpoint": "another"}]
    path.write_text(json.dumps({**document, "rows": stray}))
    assert "is of none of its 'checkpoints'" in moectl("explain", "--replay", path, code=2).stderr


def test_revisions_of_one_name_keep_the_names_that_were_typed():
    from dataclasses import replace

    from moectl.checkpoint import open_checkpoint
    from moectl.cli.explain.command import opened_of
    from moectl.cli.output import Output

    checkpoint = open_checkpoint(GPT, offline=True)

    def opened(name):
        return replace(checkpoint, origin=replace(checkpoint.origin, revision=name.partition("@")[2] or None))

    sources, _ = opened_of([GPT, f"{GPT}@v2", f"{GPT}@v2"], opened, Output("explain"))
    assert [source.origin.name for source in sources] == [GPT, f"{GPT}@v2"]
