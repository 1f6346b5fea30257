"""Deployments that vLLM 0.33.0 refuses before it creates experts."""

from dataclasses import replace

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.environment import find_device
from moectl.oracle import SelectionInputs, decide, packages_from, policy_named
from moectl.oracle.decision import DEPLOYMENT
from moectl.oracle.engines.vllm_0_33_0.routes.refusals import NO_PIPELINE
from moectl.problem.model_shape import UNKNOWN_MODEL, ModelShape
from moectl.problem.moe_problem import Parallel

GPT = ModelShape(attention_heads=64, kv_heads=8, vocabulary=201088, layers=36)
LLAMA4 = ModelShape(attention_heads=40, kv_heads=8, layers=48)
EXPERTS = open_checkpoint("openai/gpt-oss-120b", offline=True).groups[0].problem


def refused(model, parallel, policy=""):
    inputs = SelectionInputs(
        EXPERTS.on(parallel),
        find_device("h100"),
        packages_from("full"),
        policy_named(policy).name,
        model=model,
    )
    decision = decide(inputs)
    assert decision.usable == (not decision.gates)
    assert {gate.kind for gate in decision.gates} <= {DEPLOYMENT}
    return [gate.says for gate in decision.gates]


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
def test_divisors_of_the_heads_are_accepted(tp):
    assert not refused(GPT, Parallel(tp=tp))


@pytest.mark.parametrize("tp", [3, 5, 6, 24])
def test_attention_heads_must_be_divisible(tp):
    (says,) = refused(GPT, Parallel(tp=tp))
    assert says == (
        f"the number of attention heads (64) must be divisible by the tensor parallel size ({tp})"
    )


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        (LLAMA4, 10, "8 KV heads can be neither sharded nor replicated evenly over 10 TP ranks"),
        (replace(LLAMA4, attention_heads=48), 6, "8 KV heads can be neither sharded"),
        (replace(LLAMA4, kv_heads=0), 10, ""),
        (replace(LLAMA4, kv_heads=1), 10, ""),
        (replace(LLAMA4, kv_heads=5), 10, ""),
        (
            ModelShape(vocabulary=151936),
            6,
            "padded to 151936, must be divisible by the tensor parallel size (6)",
        ),
        (ModelShape(vocabulary=200064), 6, ""),
        # Padded to 49216 = 64 x 769.
        (ModelShape(vocabulary=49155), 3, "padded to 49216"),
        (UNKNOWN_MODEL, 6, ""),
    ],
)
def test_kv_heads_and_the_vocabulary_are_sharded_too(model, tp, words):
    says = refused(model, Parallel(tp=tp))
    assert len(says) == bool(words) and words in "".join(says)


@pytest.mark.parametrize("architecture", sorted(NO_PIPELINE))
def test_some_architectures_have_no_pipeline_parallelism(architecture):
    model = replace(GPT, architecture=architecture)
    assert not refused(model, Parallel(tp=2))
    assert "pipeline parallelism is not supported" in refused(model, Parallel(tp=2, pp=2))[0]
    assert not refused(GPT, Parallel(tp=2, pp=2))


def test_balancing_needs_experts_on_several_ranks():
    assert "requires expert parallelism" in refused(GPT, Parallel(tp=2, eplb=True))[0]
    assert "requires tensor or data" in refused(GPT, Parallel(ep=True, eplb=True))[0]
    assert not refused(GPT, Parallel(tp=2, ep=True, eplb=True))


def test_data_parallel_ranks_do_not_shard_attention():
    assert not refused(GPT, Parallel(tp=2, dp=3, ep=True))


def test_a_single_layer_has_no_attention():
    assert not refused(GPT, Parallel(tp=3), "moectl")
