"""`moectl explain --ask-engine`: both answers, and a sentence where the engine gives none."""

from __future__ import annotations

import pytest

from support.engine_environments import environment, unpacked_release
from support.invoking import moectl

GPT, NVFP4 = "openai/gpt-oss-20b", "nvidia/Qwen3-30B-A3B-NVFP4"
MOVED = {
    "vllm/__init__.py": "",
    "vllm/_C.abi3.so": "",
    "vllm-0.33.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n",
}


def ask(*options, code=0, where=None):
    python = ("--python", where) if where else ()
    return moectl("explain", *options, "--offline", "--ask-engine", *python, code=code)


def test_without_the_engines_answer_ours_is_printed_and_the_reason(tmp_path):
    where = environment(tmp_path / "env", MOVED)
    done = ask(GPT, "--gpu", "h200", where=where, code=3)
    assert "backend " in done.stdout and "own code" not in done.stdout
    stderr = " ".join(done.stderr.split())
    assert "error: vLLM could not be asked: ModuleNotFoundError: No module named 'vllm.platforms'" in stderr
    document = ask(GPT, "--gpu", "h200", "--json", where=where, code=3).document
    assert document["asked"]["failure"]["exit_code"] == 3 and document["rows"]


def test_an_environment_without_the_engine_is_named(tmp_path):
    where = environment(tmp_path / "env", {"other.py": ""})
    done = ask(GPT, "--gpu", "h200", where=where, code=3)
    assert f"vLLM is not installed in {where}" in " ".join(done.stderr.split())
    assert "--ask-engine --python PATH/bin/python" in done.stderr


def test_a_complete_installation_is_asked_with_its_own_packages(tmp_path):
    where = environment(tmp_path / "env", MOVED)
    done = ask(GPT, "--gpu", "h200", "--packages", "full", where=where, code=2)
    assert "--ask-engine asks the engine with the packages that are installed" in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((GPT, "--engine", "sglang"), "--ask-engine cannot ask SGLang, only vLLM"),
        ((GPT, "--engine", "all"), "--ask-engine takes no --engine all"),
        ((GPT, "--why", "marlin"), "--ask-engine takes no --why"),
        ((GPT, "--tp", "1,2"), "--ask-engine takes one checkpoint, one GPU and one deployment"),
    ],
)
def test_wrong_usage_is_a_sentence(options, says):
    assert says in " ".join(ask(*options, "--gpu", "h200", code=2).stderr.split())


@pytest.mark.slow
def test_the_release_itself_answers_as_its_rules_do(tmp_path):
    where = unpacked_release(tmp_path / "env", "0.33.0")
    done = ask(GPT, "--gpu", "b200", "--tp", "2", where=where)
    assert "vLLM 0.33.0's own code engine FLASHINFER_TRTLLM" in done.words.replace("  ", " ")
    assert "same backend, class, sizes, order, exceptions" in done.words and "differs" not in done.words
    assert "the device's properties are given to it, and the packages" in done.words


@pytest.mark.slow
def test_rules_of_another_release_differ_from_it(tmp_path):
    where = unpacked_release(tmp_path / "env", "0.28.0")
    options = (NVFP4, "--gpu", "h100", "--engine", "0.33.0", "--json")
    asked = ask(*options, where=where, code=1).document["asked"]
    assert asked["engine"] == "vLLM 0.28.0" and asked["same"] is False and asked["failure"] is None
    (group,) = asked["groups"]
    found = {each["field"]: (each["engine"], each["moectl"]) for each in group["differences"]}
    assert found["selected"] == ("MARLIN", "HUMMING")
