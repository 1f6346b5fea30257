"""Routing as documented: the reference against lists of numbers, and the entry that picks who computes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from moectl.errors import NoBackend, UsageError
from moectl.kernels import reference
from moectl.kernels.prepared_layer import Router
from moectl.kernels.routing import route, route_by
from moectl.problem.moe_problem import MoEProblem, Routing
from support.router_cases import KINDS, METHODS, VOCABULARY, case_of, expected, problem_of
from support.sampling import every_nth

LARGEST = float(np.finfo(np.float32).max)
NAN, INF = float("nan"), float("inf")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def sqrtsoftplus(x: float) -> float:
    return math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x))))


def softmax(row: list[float]) -> list[float]:
    top = max((x for x in row if x == x), default=0.0)
    parts = [math.exp(x - top) for x in row]
    total = math.fsum(part for part in parts if part == part)
    return [part / total if total else NAN for part in parts]


def each(f: object, row: list[float]) -> list[float]:
    return [x if x != x else f(x) for x in row]  # type: ignore[operator]


SCORES = {
    "softmax": softmax,
    "sigmoid": partial(each, sigmoid),
    "sqrtsoftplus": partial(each, sqrtsoftplus),
}


def best(values: list[float], count: int) -> list[int]:
    """Places of the largest values: numbers before NaN, of equal ones the first."""
    return sorted(range(len(values)), key=lambda i: (values[i] != values[i], -values[i], i))[:count]


def row_by_hand(
    row: list[float], problem: MoEProblem, bias: list[float] | None
) -> tuple[list[int], list[float]]:
    """Ids and weights of one token, but for tables, factors and sparsemixer."""
    routing, k = problem.routing, problem.top_k
    row = [x if x != x else min(max(x, -LARGEST), LARGEST) for x in row]
    scores = row if routing.after_topk else SCORES[routing.scoring](row)
    choice = row
    if bias is not None:
        with np.errstate(all="ignore"):
            choice = [float(np.float32(s) + np.float32(b)) for s, b in zip(scores, bias, strict=True)]
    if reference.limits(routing):
        size = problem.experts // (routing.groups or 1)
        groups = [choice[i : i + size] for i in range(0, problem.experts, size)]
        count = min(2 if routing.correction_bias else 1, size)
        worth = []
        for group in groups:
            values = [np.float32(-INF if group[i] != group[i] else group[i]) for i in best(group, count)]
            with np.errstate(all="ignore"):
                worth.append(float(sum(values[1:], values[0])))
        kept = best(worth, routing.topk_groups or 1)
        choice = [-INF if x == x and i // size not in kept else x for i, x in enumerate(choice)]
    ids = best(choice, k)
    weights = [scores[i] for i in ids]
    if routing.after_topk:
        weights = SCORES[routing.scoring](weights)
    if routing.renormalize:
        total = math.fsum(w for w in weights if w == w)
        weights = [w / max(total, 1e-20) for w in weights]
    return ids, [w * routing.scale for w in weights]


BY_HAND = [
    name
    for name, problem in METHODS.items()
    if problem.routing.scoring in SCORES and not (problem.routing.hashed or problem.routing.expert_scale)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BY_HAND)
def test_the_reference_by_hand(name: str, kind: str) -> None:
    problem = METHODS[name]
    case = case_of(problem, kind, 10, torch.float32)
    ids, weights = expected(problem, case)
    bias = None if case.bias is None else case.bias.tolist()
    for i, row in enumerate(case.logits.tolist()):
        wanted = row_by_hand(row, problem, bias)
        assert ids[i].tolist() == wanted[0]
        torch.testing.assert_close(weights[i], torch.tensor(wanted[1]), rtol=1e-6, atol=1e-30, equal_nan=True)


def test_nan_is_chosen_last_and_seen() -> None:
    problem = problem_of(4, 2, Routing())
    ids, weights = route(torch.tensor([[NAN, 1.0, NAN, -INF], [NAN, NAN, 3.0, NAN], [NAN] * 4]), problem)
    assert ids.tolist() == [[1, 3], [2, 0], [0, 1]]
    torch.testing.assert_close(
        weights, torch.tensor([[1.0, 0.0], [1.0, NAN], [NAN, NAN]]), equal_nan=True, rtol=0, atol=0
    )


def test_a_large_bias_rounds_scores_away_but_not_the_weights() -> None:
    problem = problem_of(4, 2, Routing("sigmoid", correction_bias=True))
    bias = torch.tensor([0.0, 1e4, 1e4, 1e4])
    ids, weights = route(torch.tensor([[9.0, 0.0, 1e-4, -4.0]]), problem, bias)
    # fp32 has a step of 2**-10 at 1e4: experts 1 and 2 are the same to it, 3 is not.
    assert ids.tolist() == [[1, 2]]
    scores = torch.tensor([sigmoid(0.0), sigmoid(1e-4)])
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_infinities_are_the_largest_numbers() -> None:
    _, weights = route(torch.tensor([[INF, INF, 1.0, -INF]]), problem_of(4, 4, Routing()))
    assert weights.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    _, weights = route(torch.tensor([[INF, 0.0]]), problem_of(2, 2, Routing("sqrtsoftplus")))
    assert weights[0, 0] == 1 and 0 < weights[0, 1] < 1e-18


def test_a_table_takes_the_place_of_the_choice() -> None:
    problem = problem_of(4, 2, Routing("sigmoid", hashed=True, scale=2.0))
    table = torch.tensor([[3, 1], [0, 2]])
    logits = torch.tensor([[9.0, 1.0, 9.0, 0.0], [0.0, 9.0, 1.0, 9.0]])
    ids, weights = route(logits, problem, table=table, token_ids=torch.tensor([0, 1]))
    assert ids.tolist() == [[3, 1], [0, 2]] and ids.dtype == torch.int32
    a, b = sigmoid(0.0), sigmoid(1.0)
    torch.testing.assert_close(weights, torch.tensor([[a, b], [a, b]]) * 2 / (a + b))


def test_factors_multiply_final_weights() -> None:
    problem = problem_of(4, 2, Routing(expert_scale=True, scale=2.0))
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    _, weights = route(logits, problem, expert_scale=torch.tensor([1.0, 0.5, 4.0, 9.0]).bfloat16())
    torch.testing.assert_close(weights, torch.tensor([[0.5, 4.0]]))


def refused(
    problem: MoEProblem, match: str, *, kind: type[Exception] = UsageError, **tensors: object
) -> None:
    logits = tensors.pop("logits", torch.zeros(2, problem.experts))
    with pytest.raises(kind, match=match):
        route(logits, problem, **tensors)  # type: ignore[arg-type]


def test_refuses_what_does_not_fit() -> None:
    hashed = problem_of(4, 2, Routing(hashed=True))
    table, tokens = torch.tensor([[0, 1], [2, 4]]), torch.tensor([0, 0])
    refused(hashed, "needs table of expert ids, but the call has none")
    refused(hashed, "needs token ids", table=table)
    refused(hashed, r"table of expert ids must be \[any, 2\], got \[2, 3\]", table=torch.zeros(2, 3).int())
    refused(hashed, r"token ids must be \[2\], got \[3\]", table=table, token_ids=torch.zeros(3).int())
    refused(hashed, "token ids must be integers, got torch.float32", table=table, token_ids=torch.zeros(2))
    refused(hashed, "token ids must be 0 to 1, got 0 to 2", table=table, token_ids=torch.tensor([0, 2]))
    refused(hashed, "of the table must be 0 to 3, got 0 to 4", table=table, token_ids=torch.tensor([0, 1]))
    refused(problem_of(4, 2, Routing()), "takes no token ids, but the call got one", token_ids=tokens)
    refused(problem_of(4, 2, Routing(expert_scale=True)), "needs expert scale")
    refused(problem_of(4, 2, Routing()), "takes no expert scale", expert_scale=torch.ones(4))
    refused(problem_of(4, 2, Routing()), "must be floats, got torch.int64", logits=torch.zeros(2, 4).long())
    refused(problem_of(4, 5, Routing()), "5 experts a token cannot be chosen from 4")
    limited = problem_of(8, 3, Routing(groups=4, topk_groups=1))
    refused(limited, "3 experts a token cannot be chosen from 2")
    mixed = problem_of(4, 2, Routing("sparsemixer", correction_bias=True))
    refused(mixed, "sparsemixer takes no correction bias", kind=NoBackend, correction_bias=torch.zeros(4))
    meta = torch.zeros(4, device="meta")
    biased = problem_of(4, 2, Routing(correction_bias=True))
    refused(biased, "must be on one device, got cpu and meta", correction_bias=meta)


def test_a_router_brings_all_its_tensors() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for name in ("grouped", "hashed", "factors"):
        problem = replace(METHODS[name], dims=METHODS["one expert"].dims)
        case = case_of(problem, "random", 6, torch.float32)
        router = Router(torch.randn(problem.experts, 8), None, case.bias, case.factors, case.table)
        ids, weights, logits = route_by(router, x, problem, torch.arange(6) % VOCABULARY)
        torch.testing.assert_close(logits, x @ router.weight.T)
        wanted = reference.route(
            logits,
            problem,
            case.bias,
            expert_scale=case.factors,
            table=case.table,
            token_ids=None if case.table is None else torch.arange(6),
        )
        assert torch.equal(ids, wanted[0]) and torch.equal(weights, wanted[1])
        assert router.to("cpu").table is router.table


@pytest.mark.parametrize("name", every_nth(["grouped", "hashed", "factors", "sparsemixer"], 2))
def test_one_operator_under_torch_compile(name: str) -> None:
    problem = METHODS[name]

    def doubled(logits: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        bias, factors, table, tokens = tensors
        ids, weights = route(logits * 2, problem, bias, expert_scale=factors, table=table, token_ids=tokens)
        return ids, weights + 1

    torch._dynamo.reset()  # other problems and other tensors are compiled anew, a few times only
    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5):
        case = case_of(problem, "random", tokens, torch.float32)
        tensors = (case.bias, case.factors, case.table, case.token_ids)
        found, wanted = compiled(case.logits, *tensors), doubled(case.logits, *tensors)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    with pytest.raises(UsageError, match="but the call"):
        compiled(case.logits, *(None if t is not None else torch.zeros(1) for t in tensors))
    r = problem.routing
    has = (problem.top_k, r.correction_bias, r.expert_scale, r.hashed)
    how = (r.scoring, r.renormalize, r.after_topk, r.groups, r.topk_groups, r.scale)
    torch.library.opcheck(torch.ops.moectl.route, (case.logits, *tensors, *has, *how))
