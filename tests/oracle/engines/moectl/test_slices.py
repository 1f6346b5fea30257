"""moectl's policy gives a rank what a conversion would slice for it, and refuses what cannot be sliced."""

from __future__ import annotations

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import model_names
from moectl.convert.rank_slice import RankShard, RankSlice
from moectl.environment import find_device
from moectl.errors import UsageError
from moectl.explain.explanation import Question, explain
from moectl.oracle.machine_packages import packages_from
from moectl.oracle.registry import policy_named
from moectl.oracle.select import select
from moectl.problem.moe_problem import Parallel
from support.invoking import moectl

MOECTL, FULL, H200 = policy_named("moectl"), packages_from("full"), find_device("h200")


@pytest.mark.parametrize("tp", (2, 4, 8, 16))
def test_the_rule_is_that_of_conversions(tp: int) -> None:
    refused = 0
    for name in model_names():
        for problem in {group.problem for group in open_checkpoint(name, offline=True).groups}:
            try:
                share = problem.on(Parallel(tp=tp))
            except UsageError:
                continue
            decision = select(share, H200, FULL, MOECTL)
            try:
                held = RankSlice(problem, RankShard(tp)).problem
            except UsageError as error:
                assert not decision.usable and decision.error == error.what
                refused += 1
            else:
                assert decision.usable and decision.problem.dims.intermediate == held.dims.intermediate
    assert refused or tp < 8


def test_whole_experts_and_other_engines_are_not_refused() -> None:
    problem = open_checkpoint("openai/gpt-oss-120b", offline=True).groups[0].problem
    assert select(problem.on(Parallel(tp=16, ep=True)), H200, FULL, MOECTL).usable
    sliced = select(problem.on(Parallel(tp=16)), H200, FULL, policy_named("vllm-0.33.0"))
    assert sliced.usable and sliced.problem.dims.intermediate == 180


@pytest.mark.parametrize(("tp", "channels"), ((4, 736), (8, 384)))
def test_explained_sizes_are_those_that_a_rank_holds(tp: int, channels: int) -> None:
    checkpoint = open_checkpoint("openai/gpt-oss-120b", offline=True)
    answer = explain(checkpoint, H200, FULL, Question(MOECTL, Parallel(tp=tp)))
    (group,) = answer.groups
    assert group.problem.dims.intermediate == channels and f"{channels} per rank" in group.facts.values()
    assert answer.memory.smallest_tp == 1
    assert group.to_json()["predicted"]["times"]
    # Other deployments are tried from the inputs, which have the whole size exactly.
    assert group.decision.inputs.problem.on(Parallel()).dims.intermediate == 2880


def test_what_cannot_be_sliced_has_a_reason_and_no_times() -> None:
    checkpoint = open_checkpoint("MiniMaxAI/MiniMax-M2", offline=True)
    for backend in (None, "moectl"):
        answer = explain(checkpoint, H200, FULL, Question(MOECTL, Parallel(tp=16), backend))
        assert not answer.usable and answer.groups[0].to_json()["predicted"] is None
        assert "1536 has 12 blocks of 128 weights, fewer than 16" in answer.groups[0].decision.error


def test_slices_of_unequal_blocks_are_the_largest_s() -> None:
    """MiniMax-M2's 12 blocks over 8 ranks are two for the first four, and one for the others."""
    checkpoint = open_checkpoint("MiniMaxAI/MiniMax-M2", offline=True)
    answer = explain(checkpoint, H200, FULL, Question(MOECTL, Parallel(tp=8)))
    assert answer.usable and answer.groups[0].problem.dims.intermediate == 256


def test_the_question_why_has_the_same_reason() -> None:
    words = ("--policy", "moectl", "--gpu", "h200", "--tp", "16", "--why", "moectl", "--offline")
    said = " ".join(moectl("explain", "MiniMaxAI/MiniMax-M2", *words, code=None).stdout.split())
    assert "moectl is not asked: intermediate size 1536 has 12 blocks of 128 weights, fewer than 16" in said
    assert "passes all checks" not in said and "--tensor-parallel-size 4" in said
