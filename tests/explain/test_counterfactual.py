"""Counterfactuals: every answer is verified, smallest first, and comes from failing questions."""

import shlex
from functools import cache
from itertools import combinations

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import model_names
from moectl.explain.assumed_machines import machine
from moectl.explain.assumptions import can_declare
from moectl.explain.counterfactual import why
from moectl.explain.proposed_changes import BY_GROUP, BY_QUESTION, FIXED, KINDS
from moectl.oracle import SelectionInputs, decide, policy_named
from moectl.oracle.backend import GROUPS
from moectl.oracle.checks import CHECKS
from moectl.oracle.format_keys import act_key
from moectl.problem.moe_problem import Parallel
from support.sampling import every_nth

GPT, KIMI = "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking"
LOW_LATENCY = Parallel(dp=8, ep=True, all2all="deepep_low_latency")


@cache
def groups_of(model):
    """The layer groups of a built-in model; to read a large one takes half a second."""
    return open_checkpoint(model, offline=True).groups


def situation(model, gpu, parallel=Parallel(), packages=None, env=()):
    found = machine(gpu, packages, dict(env))
    problem = groups_of(model)[0].problem.on(parallel)
    return SelectionInputs(problem, found.device, found.packages, policy_named().name)


def kinds(answer):
    return tuple(sorted((change.kind for change in answer.changes), key=KINDS.index))


def test_nothing_has_to_change_for_what_is_chosen():
    assert why(situation(GPT, "h200"), "triton").chosen


@pytest.mark.parametrize(
    ("asked", "backend", "expected"),
    [
        ((GPT, "h200"), "marlin", ("request",)),
        ((KIMI, "b200"), "flashinfer_trtllm", ("variable",)),
        ((GPT, "h200", Parallel(), "bare"), "triton", ("package",)),
        ((GPT, "h200"), "emulation", ("request", "package")),
        ((GPT, "h200"), "flashinfer_trtllm", ("gpu",)),
        ((KIMI, "h100"), "flashinfer_trtllm", ("variable", "gpu")),
        ((KIMI, "b200", LOW_LATENCY), "flashinfer_trtllm", ("variable", "parallel")),
        ((GPT, "h200"), "aiter", ("variable", "gpu")),
        ((KIMI, "b200", Parallel(tp=128)), "marlin", ("parallel",)),
    ],
)
def test_the_smallest_answer_comes_first(asked, backend, expected):
    found = why(situation(*asked), backend)
    assert kinds(found.answers[0]) == expected
    sizes = [sorted((c.size for c in answer.changes), reverse=True) for answer in found.answers]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("backend", ["flashinfer_trtllm", "emulation", "aiter", "humming", "triton_unfused"])
@pytest.mark.parametrize("where", [(GPT, "h200"), (KIMI, "a100", LOW_LATENCY)])
def test_every_answer_holds_and_needs_each_of_its_changes(where, backend):
    start = situation(*where)

    def reaches(changes):
        now = start
        for change in sorted(changes, key=lambda c: -c.size):
            now = change.apply(now)
        decision = decide(now)
        chosen = decision.chosen
        return decision.usable and chosen.backend.name in policy_named(start.policy).requested_backends(
            backend
        )

    found = why(start, backend)
    assert not found.chosen
    for answer in found.answers:
        assert reaches(answer.changes)
        for other in answer.also:
            largest = max(answer.changes, key=lambda change: change.size)
            assert reaches([other, *(c for c in answer.changes if c is not largest)])
        for fewer in combinations(answer.changes, len(answer.changes) - 1):
            assert not fewer or not reaches(fewer)


def test_what_cannot_be_changed_is_named():
    found = why(situation(GPT, "h200"), "deep_gemm")
    assert not found.answers and found.complete
    assert {verdict.question for _, verdict in found.remaining} == {"activation function"}


def test_a_backend_of_other_formats_says_of_which():
    found = why(situation(KIMI, "h200"), "aiter_mxfp4_fp8")
    assert not found.answers and not found.remaining
    assert "MXFP4 of gpt-oss" in found.reason and "compressed-tensors" in found.reason


def test_a_shard_that_breaks_groups_is_mended_by_fewer_ranks_or_padding():
    found = why(situation(KIMI, "h200", Parallel(tp=128)), "marlin")
    assert {"parallel", "padding"} <= {change.kind for answer in found.answers for change in answer.changes}


GPTQ, AWQ = "Qwen/Qwen3-30B-A3B-GPTQ-Int4", "QuantTrio/Qwen3.6-35B-A3B-AWQ"


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "proposed"), [(GPTQ, "l40s", 4, {(2, False), (1, False), (4, True)})]
)
def test_the_search_leads_back_to_the_method_that_has_the_backend(model, gpu, tp, proposed):
    start = situation(model, gpu, Parallel(tp=tp))
    assert decide(start).method == "MoeWNA16Method"
    found = why(start, "marlin")
    first = found.answers[0]
    assert kinds(first) == ("parallel",)
    assert first.decision.method == "AutoGPTQMoEMethod"
    deployments = [change.apply(start).problem.parallel for change in (*first.changes, *first.also)]
    assert {(parallel.tp, parallel.ep) for parallel in deployments} == proposed


def test_quantized_layers_of_a_mixed_checkpoint_lead_back_too():
    quantized = next(group for group in groups_of(AWQ) if group.problem.storage == "awq")
    found = machine("l40s", None, {})
    start = SelectionInputs(
        quantized.problem.on(Parallel(tp=8)), found.device, found.packages, policy_named().name
    )
    answers = why(start, "marlin").answers
    assert "--enable-expert-parallel" in " ".join(c.text for c in (*answers[0].changes, *answers[0].also))


@pytest.mark.parametrize(
    ("model", "backend"), [(GPT, "flashinfer_cutlass"), (GPTQ, "triton"), (KIMI, "cutlass")]
)
@pytest.mark.parametrize("gpu", ["rtx5090", "h200", "b200"])
def test_no_answer_needs_a_checkpoint_that_cannot_exist(model, backend, gpu):
    for answer in why(situation(model, gpu), backend).answers:
        for change in (*answer.changes, *answer.also):
            problem = change.apply(situation(model, gpu)).problem
            if problem.storage in ("gpt_oss", "gptq") and change.kind == "checkpoint":
                assert problem.scheme.act.name == "a16"
            assert "activation scales" not in change.text or not problem.scheme.act.dynamic


@pytest.mark.parametrize("name", every_nth(model_names(), 4))
def test_what_published_checkpoints_declare_can_be_declared(name):
    for group in open_checkpoint(name, offline=True).groups:
        act = act_key(group.problem.scheme.act)
        assert can_declare(group.problem, act), act


def test_every_question_has_a_generator_or_is_about_what_the_model_is():
    for check in CHECKS:
        assert (check.question in BY_QUESTION) != (check.question in FIXED), check.question
    assert set(BY_GROUP) == set(GROUPS)


DEEPEP = ["--dp", "8", "--ep", "--all2all", "deepep_low_latency"]


def commands():
    for model, options, backend in (
        (GPT, ["--gpu", "h200"], "flashinfer_trtllm"),
        (GPT, ["--gpu", "h200", "--packages", "bare"], "triton"),
        (GPT, ["--gpu", "h200"], "flashinfer_cutlass"),
        (GPT, ["--gpu", "h200"], "aiter"),
        (
            KIMI,
            ["--gpu", "h100", "--dp", "8", "--ep", "--all2all", "deepep_low_latency"],
            "flashinfer_trtllm",
        ),
        (KIMI, ["--gpu", "h200", "--tp", "128"], "marlin"),
        (KIMI, ["--gpu", "h200", "--env", "VLLM_BATCH_INVARIANT=1"], "triton"),
        # Packages that are stated are not those of another platform.
        ("deepseek-v3", ["--gpu", "mi355x", "--packages", "bare"], "deep_gemm"),
        # Asked for by name, slices are padded that the order's checks refuse.
        (
            "Qwen/Qwen3-30B-A3B-FP8",
            ["--gpu", "t4", "--tp", "8", "--packages", "bare"],
            "marlin",
        ),
        # More than one rank is needed.
        ("nvidia/DeepSeek-V3.1-NVFP4", ["--gpu", "b200"], "flashinfer_moe_ep_cutedsl"),
        # A model's own kernels, which only a request by name reaches.
        ("deepseek-v4-flash", ["--gpu", "h200"], "deep_gemm_mega_moe"),
        ("deepseek-v4-flash", ["--gpu", "mi355x"], "aiter_mega_moe"),
    ):
        yield pytest.param(model, options, backend, id=f"{model}-{backend}-{'-'.join(options[1:2])}")


@pytest.mark.parametrize(("model", "options", "backend"), list(commands()))
def test_the_commands_that_are_printed_get_the_backend(model, options, backend):
    from support.invoking import moectl

    document = moectl("explain", model, "--offline", "--json", *options, "--why", backend).document
    answers = document["why"][0]["answers"]
    assert answers
    for answer in answers:
        program, *arguments = shlex.split(answer["command"])
        assert program == "moectl"
        decision = moectl(*arguments, "--offline", "--json").document["groups"][0]["decision"]
        assert decision["usable"]
        assert decision["chosen"]["experts"] == answer["experts"]
        assert decision["chosen"]["backend"] in policy_named().requested_backends(backend)


@pytest.mark.parametrize(
    "backend", every_nth((name for name in policy_named().request_names() if name != "auto"), 2)
)
def test_every_name_that_may_be_asked_for_gets_answers_or_a_reason(backend):
    from support.invoking import moectl

    found = moectl("explain", GPT, "--gpu", "h200", "--offline", "--json", "--why", backend, code=None)
    assert found.code in (0, 1), found.words
    why = found.document["why"][0]
    assert why["chosen"] or why["answers"] or why["remaining"] or why["reason"]
