"""Layers with random weights: every format's products are of ordinary size, and names are checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.convert.canonical import row_order
from moectl.errors import UsageError
from moectl.kernels.layer_inputs import make_inputs
from moectl.layer.experts import decode
from moectl.layer.random_layer import RandomLayer, routings, tokens_of
from moectl.problem.moe_problem import Dims
from moectl.problem.published_layers import MODELS, default_format, model_problem, named_problem
from moectl.problem.schemes import (
    BF16,
    FP8_BLOCK,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    Scheme,
    WeightFormat,
    int_format,
)

CPU = torch.device("cpu")
WEIGHTS = (
    BF16,
    FP8_BLOCK,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    int_format(4, 32, zero_point=True),
    int_format(8, 64),
)


def small(model: str) -> RandomLayer:
    problem = replace(MODELS[model], dims=Dims(256, 128), experts=12, local_experts=12)
    return RandomLayer(problem, CPU)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "kimi-k2"])
def test_experts_are_those_of_the_distribution(model: str) -> None:
    problem = small(model).problem
    for routed in routings(problem, 50, "experts:4", 3, CPU):
        assert routed.ids.unique().numel() == max(4, problem.top_k)
        assert torch.allclose(routed.weights.sum(-1), torch.ones(50))
        assert all(len(set(row)) == problem.top_k for row in routed.ids.tolist())


def test_routings_differ_and_repeat() -> None:
    first, again = (routings(small("kimi-k2").problem, 9, "uniform", 2, CPU) for _ in range(2))
    assert torch.equal(first[0].ids, again[0].ids) and not torch.equal(first[0].ids, first[1].ids)


def test_routings_of_a_rank_have_the_experts_that_it_has() -> None:
    problem = small("kimi-k2").problem
    (whole,) = routings(problem, 40, "uniform", 1, CPU)
    (here,) = routings(replace(problem, local_experts=3), 40, "uniform", 1, CPU)
    assert torch.equal(here.ids, torch.where(whole.ids < 3, whole.ids, -1)) and here.ids.dtype == torch.int32
    assert torch.equal(here.weights, whole.weights)


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_products_are_of_ordinary_size_in_every_format(weight: WeightFormat) -> None:
    sizes = {"dims": Dims(256, 128), "experts": 6, "local_experts": 6, "top_k": 2}
    problem = replace(MODELS["qwen3-30b"], scheme=Scheme(weight), **sizes)
    layer = RandomLayer(problem, CPU)
    (routed,) = routings(problem, 8, "uniform", 1, CPU)
    y = layer.reference(tokens_of(problem, 8, CPU), routed, list(range(8)))
    assert 0.05 < float(y.std()) < 5
    prepared = layer.experts.prepared("torch", CPU)
    assert torch.equal(prepared.expert(3).w13, layer.experts.reference(3).w13)


def test_a_model_takes_another_format_and_fewer_experts() -> None:
    assert model_problem("kimi-k2") == MODELS["kimi-k2"]
    assert named_problem("kimi-k2") == ("kimi-k2", MODELS["kimi-k2"])
    assert named_problem("kimi-k2:mxfp4") == ("kimi-k2", model_problem("kimi-k2", "mxfp4"))
    made = model_problem("kimi-k2", "mxfp4", 12)
    assert (made.scheme.weight, made.experts, made.local_experts) == (MXFP4, 12, 12)
    assert [default_format(model) for model in ("gpt-oss-20b", "qwen3-30b")] == ["mxfp4", "int4-g128"]
    with pytest.raises(UsageError, match="no model is called 'gpt-5'; there are gpt-oss-120b"):
        model_problem("gpt-5")
    with pytest.raises(UsageError, match="no format is called 'int3'"):
        named_problem("kimi-k2:int3")
    with pytest.raises(UsageError, match="no format is called ''"):
        named_problem("kimi-k2:")


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_rows_in_pairs_are_the_same_rows_as_gates_first(weight: WeightFormat) -> None:
    """Scales of several rows, and factors on scales, are of gate and of up in either order."""
    sizes = {"dims": Dims(256, 128), "experts": 3, "local_experts": 3, "top_k": 2}
    apart = replace(MODELS["qwen3-30b"], scheme=Scheme(weight), **sizes)
    pairs = replace(apart, rows="interleaved")
    roles = RandomLayer(apart, CPU).canonical(range(3))
    if "w13_global" in roles:
        roles["w13_global"] = torch.tensor([0.5, 2.0]).view(1, 2, 1) * roles["w13_global"]

    def in_pairs(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)

    mixed = {
        name: in_pairs(t) if name.startswith("w13") and row_order(pairs, name) == "interleaved" else t
        for name, t in roles.items()
    }
    wanted, got = decode(roles, apart), decode(mixed, pairs)
    assert torch.equal(got.w13, in_pairs(wanted.w13)) and torch.equal(got.w2, wanted.w2)


def test_weights_tokens_and_routings_are_draws_of_their_own() -> None:
    """None begins with the numbers of another, whose seeds may be the same small number."""
    sizes = {"dims": Dims(64, 64), "experts": 64, "local_experts": 64, "top_k": 2}
    problem = replace(MODELS["qwen3-30b"], scheme=Scheme(BF16), **sizes)
    layer = RandomLayer(problem, CPU)
    drawn = [layer.canonical([expert])[role][0] for expert in range(2) for role in ("w13", "w2")]
    drawn += [tokens_of(problem, tokens, CPU) for tokens in (1, 64)]
    drawn += [make_inputs(problem, 64, seed).x for seed in range(4)]
    firsts = [t.flatten()[:16].float() for t in drawn]
    firsts = [t / t.norm() for t in firsts]
    alike = [(i, j) for i, a in enumerate(firsts) for j, b in enumerate(firsts[:i]) if float(a @ b) > 0.99]
    assert not alike
