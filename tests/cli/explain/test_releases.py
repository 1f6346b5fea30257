"""`moectl explain --from`: which decisions two releases make differently, and by which rules."""

from __future__ import annotations

import pytest

from support.invoking import moectl

NVFP4, BF16, MXFP4 = "nvidia/Qwen3-30B-A3B-NVFP4", "mixtral-8x7b", "openai/gpt-oss-120b"
SHORT = ("--from", "0.31.0", "--to", "0.33.0")
BETWEEN = ("--from", "vllm==0.31.0", "--to", "vllm==0.33.0")


def explain(*options, code=0):
    return moectl("explain", *options, "--offline", code=code)


def test_what_changed_is_said_with_its_rule_and_where_it_applies():
    done = explain(NVFP4, BF16, *BETWEEN, "--gpu", "h100,b200", "--tp", "1,2", code=1)
    assert done.stdout.startswith("from vLLM 0.31.0 to vLLM 0.33.0\n")
    assert "2 of 8 decisions differ." in done.words
    assert "marlin -> humming, nvfp4 group 16, nvfp4 dynamic activations" in done.words
    assert "because Humming has priority over Marlin on compute capability 9.0 only" in done.words
    assert "HummingIndexedExperts now has priority over MarlinExperts" in done.words
    assert f"NVIDIA H100 80GB HBM3 {NVFP4} (TP 1, TP 2)" in done.words and "B200" not in done.words


def test_json_has_the_changes_and_the_other_way_round_the_backends_are_swapped():
    options = (NVFP4, "--gpu", "h100", "--json")
    forth = explain(*options, *BETWEEN, code=1).document
    back = explain(*options, "--from", "vllm==0.33.0", "--to", "vllm==0.31.0", code=1).document
    assert forth["releases"]["from"] == back["releases"]["to"] == "vllm-0.31.0"
    assert forth["policy"] == "vllm-0.33.0" and forth["rows"] == [] and forth["releases"]["decisions"] == 1
    (there,), (again,) = (document["releases"]["changes"] for document in (forth, back))
    assert (there["before"], there["after"]) == (again["after"], again["before"]) == ("marlin", "humming")
    assert there["checkpoint"] == NVFP4 and there["parallel"]["tp"] == 1 and len(there["layers"]) == 48
    # Each side is what the release answers alone.
    for version, backend in (("0.31.0", "marlin"), ("0.33.0", "humming")):
        alone = explain(*options, "--engine", f"vllm=={version}").document
        assert alone["groups"][0]["decision"]["chosen"]["backend"] == backend


def test_quiet_is_a_line_for_each_change_and_nothing_is_said_of_none():
    done = explain(NVFP4, *SHORT, "--gpu", "h100", "-q", code=1)
    assert done.stdout == f"{NVFP4}\tNVIDIA H100 80GB HBM3\tTP 1\tmarlin\thumming\n"
    done = explain(BF16, *BETWEEN, "--gpu", "h100")
    assert "The decision is the same." in done.words


def test_a_decision_that_only_one_release_makes_says_why():
    done = explain("amd/Kimi-K2.5-MXFP4", *BETWEEN, "--gpu", "b200", code=1)
    assert (
        "no backend -> cutlass" in done.words
        and "CutlassExpertsMxfp4 was not a candidate before" in done.words
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--from", "vllm==0.33.0"), "--from and --to are the same release, vLLM 0.33.0"),
        (("--from", "vllm==0.11.0"), "moectl has no rules for vLLM 0.11.0"),
        (("--from", "vllm==0.31.0", "--why", "humming"), "--from takes no --why"),
    ],
)
def test_wrong_usage_is_a_sentence(options, says):
    assert says in " ".join(explain(BF16, *options, "--gpu", "h100", code=2).stderr.split())
