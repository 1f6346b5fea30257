"""What `moectl explain` says of engine variables, packages and tuned files."""

import json
from dataclasses import replace

from moectl.checkpoint import open_checkpoint
from moectl.cli.explain.environment import package_sentences, tuned_sentence
from moectl.environment import Packages, find_device
from moectl.explain import Question, explain
from moectl.oracle.engines.vllm_0_33_0.tuned_files import TUNED_FILES, TunedName
from moectl.oracle.registry import policy_named
from moectl.oracle.tuned_files import TunedStatus
from support.invoking import moectl

MODEL = ("explain", "Qwen/Qwen3-30B-A3B", "--offline")


def environment(*arguments, code=0):
    """The environment section of one explanation, as text with single blanks, and as plain data."""
    text = moectl(*MODEL, *arguments, "-v", code=code).stdout
    document = moectl(*MODEL, *arguments, "--json", code=code).document["environment"]
    return " ".join(text.partition("\nenvironment\n")[2].split()), document


def test_a_missing_file_is_named_with_near_misses():
    text, document = environment("--gpu", "h100-pcie", "--tp", "2")
    name = "E=128,N=384,device_name=NVIDIA_H100_PCIe.json"
    assert f"{name} not found (in vLLM's own folder)" in text
    assert "not an error" in text
    assert "NVIDIA_H100_80GB_HBM3" in text
    (tuned,) = document["tuned"]
    assert (tuned["wanted"], tuned["found"], len(tuned["layers"])) == (name, None, 48)


def test_a_file_of_the_users_is_found(tmp_path):
    name = "E=128,N=384,device_name=NVIDIA_H100_PCIe.json"
    (tmp_path / name).write_text("{}")
    folder = f"VLLM_TUNED_CONFIG_FOLDER={tmp_path}"
    text, document = environment("--gpu", "h100-pcie", "--tp", "2", "--env", folder)
    assert f"{name} is used (found in {tmp_path})" in text.replace("- ", "-")
    assert document["tuned"][0]["found"] == str(tmp_path)
    (tmp_path / name).write_text("[]")
    text, document = environment("--gpu", "h100-pcie", "--tp", "2", "--env", folder)
    assert "holds no table of kernel configs, and vLLM fails on it" in text
    assert "vLLM fails on it" in document["tuned"][0]["remark"]
    text, _ = environment("--gpu", "h100-pcie", "--tp", "4", "--env", folder)
    assert f"not found (in {tmp_path}, vLLM's own folder)" in text


def test_a_backend_that_reads_none_is_told():
    text, document = environment("--gpu", "b200")
    assert "flashinfer_trtllm (TrtLlmBf16ExpertsMonolithic) reads no tuned files" in text
    assert document["tuned"][0]["reads"] is False


def test_variables_are_told_once():
    switches = ("--env", "VLLM_FLASHINFER_MOE_BACKEND=latency", "--env", "VLLM_USE_DEPP_GEMM=0")
    text, document = environment("--gpu", "h200", *switches)
    whole = moectl(*MODEL, "--gpu", "h200", *switches).stdout
    assert "warning" in whole
    assert " ".join(whole.split()).count("ignores VLLM_FLASHINFER_MOE_BACKEND") == 1
    assert "did you mean VLLM_USE_DEEP_GEMM" in text
    verdicts = {found["name"]: found["verdict"] for found in document["variables"]}
    assert verdicts == {
        "VLLM_FLASHINFER_MOE_BACKEND": "ignored",
        "VLLM_HAS_FLASHINFER_CUBIN": "set",
        "VLLM_USE_DEPP_GEMM": "unknown",
    }
    verbose = moectl(*MODEL, "--gpu", "h200", "-v").stdout
    assert "VLLM_HAS_FLASHINFER_CUBIN=1: assumes that FlashInfer's kernels are installed" in " ".join(
        verbose.split()
    )


def test_another_policy_has_no_variables():
    _, document = environment("--gpu", "h200", "--policy", "moectl", "--env", "VLLM_QQ=1", code=0)
    assert document["variables"] == []


def test_markdown_has_the_section():
    text = moectl(*MODEL, "--gpu", "h100-pcie", "--md").stdout
    assert "### environment" in text
    assert "- tuned files: " in text


def test_sentences_of_packages():
    made = explain(
        open_checkpoint("Qwen/Qwen3-30B-A3B", offline=True),
        find_device("h200"),
        Packages({"flashinfer": "0.7"}, frozenset({"flashinfer:b", "flashinfer:a"}), {}, ("a remark",)),
        Question(policy_named("vllm-0.33.0")),
    )
    assert list(package_sentences(made)) == [
        "a remark",
        "FlashInfer has neither compiled kernels (flashinfer-cubin) nor nvcc and ninja to compile them: "
        "none of its backends can be used",
        "flashinfer 0.7 lacks a, b",
    ]
    whole = replace(made, packages=Packages({"flashinfer": "", "nvcc": "", "ninja": ""}))
    assert list(package_sentences(whole)) == []
    assert json.dumps(made.to_json())


def test_a_class_that_falls_back_says_for_which_calls():
    status = TunedStatus(True, "for calls that are odd", TunedName(8, 64, "G"), folders=("here",))
    wanted = "for calls that are odd, E=8,N=64,device_name=G.json not found (in here)"
    assert tuned_sentence(status, TUNED_FILES).startswith(wanted)


def test_a_stated_version_that_is_too_old_is_a_failing_check(tmp_path):
    options = ["openai/gpt-oss-120b", "--gpu", "b200", "--offline", "--packages"]
    done = moectl("explain", *options, "flashinfer=0.1.0")
    assert "backend marlin" in done.words
    assert "needs flashinfer 0.7.2 or newer; found 0.1.0" in done.words
    assert "flashinfer 0.1.0 is too old: its backends need 0.7.2" in done.words
    assert moectl("explain", *options, "flashinfer=0.7.2", "-q").stdout == "0-35\tflashinfer_trtllm\n"
    path = tmp_path / "old.json"
    path.write_text(moectl("explain", *options, "flashinfer=0.1.0", "--json").stdout)
    assert moectl("explain", "--replay", str(path), "-q").stdout == "0-35\tmarlin\n"
