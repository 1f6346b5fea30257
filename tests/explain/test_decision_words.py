"""Reasons in sentences: none has a hole, and each goes on with a verb after the backend's name."""

import re
from pathlib import Path

import pytest
from devtools.conformance import decide, read_decisions, read_grid
from devtools.conformance.grid import has_meaning

from moectl.explain.decision_words import because, failure
from moectl.oracle import engine_named, policy_named

DATA = Path(__file__).parents[1] / "data" / "oracle"
HOLES = re.compile(r"(?:\b(?:it|and|but|since|because)\s*(?:$|[.;])|[:;,]\s*(?:$|[.;,])|  |^$)")
VERBS = ("needs", "supports", "does", "uses", "computes", "is")


@pytest.mark.parametrize("version", ["0.33.0", "0.32.0", "0.31.0", "0.30.0", "0.28.0", "0.26.0"])
def test_no_sentence_about_a_recorded_decision_has_a_hole(version: str) -> None:
    name = "sample" if version == "0.33.0" else version
    grid, policy, engine = read_grid(), policy_named(f"vllm=={version}"), engine_named(f"vllm=={version}")
    refused = 0
    recorded = (record for _, record in read_decisions(DATA / f"decisions-{name}.jsonl.gz"))
    without = [record for record in recorded if record["selected"] is None or record["error"]]
    for record in without if version == "0.33.0" else without[::5]:
        if not has_meaning(grid, record, engine):
            continue
        decision = decide(grid, record, policy)
        said = [because(decision)]
        if not decision.usable:
            said.append(failure(decision))
        for text in said:
            assert not HOLES.search(text), text
            _, _, lacks = text.partition(" was requested by name, but it ")
            assert not lacks or lacks.startswith(VERBS), text
            refused += bool(lacks)
    assert refused > 5


def test_a_request_that_the_method_refuses_before_any_check_says_why() -> None:
    """No check of the requested class fails: the sentence is the method's."""
    grid, policy = read_grid(), policy_named("vllm")
    asked = {"scheme": "fp8_block128_dynamic", "device": "sm90", "profile": "full", "parallel": "tp8"}
    record = {**asked, "model": "odd", "forced": "flashinfer_cutlass"}
    grid.models["odd"] = {**grid.models["qwen3-30b-a3b"], "hidden": 2112, "inter": 2112}
    decision = decide(grid, record, policy)
    assert decision.chosen is None and any(not candidate.failed for candidate in decision.candidates)
    assert because(decision) == decision.error
