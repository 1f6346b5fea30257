"""The reference, held to computations written out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.errors import NoBackend, UsageError
from moectl.kernels.activation import GATED, UNGATED, activate
from moectl.kernels.prepared_layer import DenseExpert, Router
from moectl.kernels.reference import moe_reference, route
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import BF16, Scheme


def problem(experts: int = 4, top_k: int = 2, **fields: object) -> MoEProblem:
    base = MoEProblem(Dims(2, 1), experts, top_k, Scheme(BF16))
    return replace(base, **fields)  # type: ignore[arg-type]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def test_softmax_over_the_chosen_is_a_renormalized_softmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    total = math.exp(2) + math.exp(1)
    for routing in (Routing(after_topk=True), Routing()):
        ids, weights = route(logits, problem(routing=routing))
        assert ids.tolist() == [[1, 2]] and ids.dtype == torch.int32
        torch.testing.assert_close(weights, torch.tensor([[math.exp(2) / total, math.exp(1) / total]]))


def test_softmax_without_renormalization_keeps_the_share_of_all_experts() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    _, weights = route(logits, problem(routing=Routing(renormalize=False)))
    torch.testing.assert_close(weights, torch.softmax(logits, -1)[:, [1, 2]])


def test_a_correction_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    routing = Routing("sigmoid", correction_bias=True, scale=2.827)
    ids, weights = route(logits, problem(routing=routing), bias)
    first, second = sigmoid(-1), sigmoid(2)
    assert ids.tolist() == [[3, 1]]
    expected = torch.tensor([[first, second]]) / (first + second) * 2.827
    torch.testing.assert_close(weights, expected)


def test_square_root_of_softplus_scores() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    _, weights = route(logits, problem(routing=Routing("sqrtsoftplus", renormalize=False)))
    expected = torch.tensor([[math.sqrt(math.log1p(math.exp(v))) for v in (2.0, 1.0)]])
    torch.testing.assert_close(weights, expected)


def test_groups_limit_the_choice() -> None:
    # Group 0 holds the best expert, group 1 the best two: with a correction bias the pair decides.
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    limited = Routing("sigmoid", groups=2, topk_groups=1)
    assert route(logits, problem(routing=limited))[0].tolist() == [[0, 1]]
    biased = replace(limited, correction_bias=True)
    assert route(logits, problem(routing=biased), torch.zeros(4))[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("after_topk", [False, True])
def test_ties_go_to_the_lower_expert(scoring: str, after_topk: bool) -> None:
    logits = torch.zeros(3, 200)
    logits[1, 150:] = 1.0
    logits[2, ::7] = 2.0
    ids, _ = route(logits, problem(200, 4, routing=Routing(scoring, after_topk=after_topk)))
    assert ids.tolist() == [[0, 1, 2, 3], [150, 151, 152, 153], [0, 7, 14, 21]]


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_weights_sum_to_the_scale_and_ids_differ(tokens: int, top_k: int, seed: int) -> None:
    logits = torch.randn(tokens, 9, generator=torch.Generator().manual_seed(seed))
    ids, weights = route(
        logits, problem(9, top_k, routing=Routing("sigmoid", scale=2.5)), dtype=torch.float64
    )
    assert ids.shape == weights.shape == (tokens, top_k)
    torch.testing.assert_close(weights.sum(1), torch.full((tokens,), 2.5, dtype=torch.float64))
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_routing_refuses_what_does_not_fit() -> None:
    logits = torch.zeros(1, 4)
    with pytest.raises(UsageError, match=r"\[tokens, 5\], got \[1, 4\]"):
        route(logits, problem(5))
    with pytest.raises(UsageError, match="needs correction bias"):
        route(logits, problem(routing=Routing(correction_bias=True)))
    with pytest.raises(UsageError, match="takes no correction bias"):
        route(logits, problem(), torch.zeros(4))
    with pytest.raises(UsageError, match=r"must be \[4\], got \[3\]"):
        route(logits, problem(routing=Routing(correction_bias=True)), torch.zeros(3))
    with pytest.raises(NoBackend, match="'tanh'"):
        route(logits, problem(routing=Routing("tanh")))
    with pytest.raises(UsageError, match="do not divide into 3 groups"):
        route(logits, problem(routing=Routing(groups=3, topk_groups=1)))


def test_silu_in_both_row_orders() -> None:
    gate, up = 1.5, -2.0
    expected = torch.tensor([[gate * sigmoid(gate) * up, 0.0]])
    torch.testing.assert_close(activate(torch.tensor([[gate, 0.0, up, 0.0]]), SILU, "concatenated"), expected)
    torch.testing.assert_close(activate(torch.tensor([[gate, up, 0.0, 0.0]]), SILU, "interleaved"), expected)


@pytest.mark.parametrize(
    ("gate", "up", "used_gate", "used_up"),
    [(1.5, -2.0, 1.5, -2.0), (9.0, 9.0, 7.0, 7.0), (-9.0, -9.0, -9.0, -7.0)],
)
def test_clamped_swiglu(gate: float, up: float, used_gate: float, used_up: float) -> None:
    expected = used_gate * sigmoid(1.702 * used_gate) * (used_up + 1)
    result = activate(torch.tensor([gate, up], dtype=torch.float64), SWIGLU_OAI, "interleaved")
    torch.testing.assert_close(result, torch.tensor([expected], dtype=torch.float64))


def normal(x: float) -> float:
    """The distribution function of the standard normal."""
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


WRITTEN_OUT = {
    "silu": (
        Activation("silu", limit=1.0),
        lambda g, u: min(g, 1.0) * sigmoid(min(g, 1.0)) * max(-1.0, min(u, 1.0)),
    ),
    "swigluoai": (Activation("swigluoai", alpha=2.0), lambda g, u: g * sigmoid(2 * g) * (u + 1)),
    "swiglustep": (
        Activation("swiglustep", limit=1.0),
        lambda g, u: min(g * sigmoid(g), 1.0) * max(-1.0, min(u, 1.0)),
    ),
    "gelu": (Activation("gelu"), lambda g, u: g * normal(g) * u),
    "gelu_tanh": (Activation("gelu_tanh"), lambda g, u: gelu_tanh(g) * u),
    "situ": (
        Activation("situ", beta=4.0, linear_beta=25.0),
        lambda g, u: 4 * math.tanh(g / 4) * sigmoid(g) * 25 * math.tanh(u / 25),
    ),
}
WITHOUT_GATE = {
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * normal(x),
    "gelu_tanh": gelu_tanh,
}
POINTS = [(g, u) for g in (-6.0, -0.5, 0.0, 0.7, 6.0) for u in (-6.0, 0.3, 6.0)]


@pytest.mark.parametrize("name", GATED)
def test_gated_activations_written_out(name: str) -> None:
    activation, expected = WRITTEN_OUT[name]
    h13 = torch.tensor(POINTS, dtype=torch.float64)
    result = activate(h13, activation, "interleaved")
    wanted = torch.tensor([[expected(g, u)] for g, u in POINTS], dtype=torch.float64)
    torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("name", UNGATED)
def test_activations_without_a_gate_written_out(name: str) -> None:
    x = torch.linspace(-6, 6, 25, dtype=torch.float64)
    wanted = torch.tensor([WITHOUT_GATE[name](v) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(activate(x[None], Activation(name, gated=False), "concatenated")[0], wanted)


def test_sparsemixer_weighs_each_expert_among_those_near_it() -> None:
    problem = MoEProblem(Dims(8, 8), 4, 2, Scheme(BF16), routing=Routing("sparsemixer", renormalize=False))
    logits = torch.tensor([[2.0, 1.99, 1.0, 0.99], [3.0, -1.0, 0.5, -2.0]])
    ids, weights = route(logits, problem)
    assert ids.tolist() == [[0, 1], [0, 2]]
    near = math.exp(2.0) / (math.exp(2.0) + math.exp(1.99))
    # The second is alone: 1.0 is further below it than two hundredths, and the first is chosen already.
    torch.testing.assert_close(weights, torch.tensor([[near, 1.0], [1.0, 1.0]]))


def test_activation_refuses_what_it_does_not_know() -> None:
    with pytest.raises(NoBackend, match="relu2 of gated experts"):
        activate(torch.zeros(1, 2), Activation("relu2"), "concatenated")
    with pytest.raises(NoBackend, match="situ of experts without a gate"):
        activate(torch.zeros(1, 2), Activation("situ", gated=False), "concatenated")
    with pytest.raises(UsageError, match="sideways"):
        activate(torch.zeros(1, 2), SILU, "sideways")


def tiny_expert(scale: float) -> DenseExpert:
    """hidden 2, intermediate 1: gate = scale * x0 + 0.5, up = x1, out = (2 a, -a + 1)."""
    return DenseExpert(
        torch.tensor([[scale, 0.0], [0.0, 1.0]]),
        torch.tensor([[2.0], [-1.0]]),
        torch.tensor([0.5, 0.0]),
        torch.tensor([0.0, 1.0]),
    )


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_a_layer_written_out(weight_on_input: bool) -> None:
    x = torch.tensor([[1.0, 3.0], [2.0, -1.0], [5.0, 5.0]])
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [0.5, 9.0], [1.0, 1.0]])
    routing = Routing(weight_on_input=weight_on_input)

    def term(token: int, expert: int, weight: float) -> tuple[float, float]:
        before, after = (weight, 1.0) if weight_on_input else (1.0, weight)
        gate = (expert + 1) * float(x[token, 0]) * before + 0.5
        a = gate * sigmoid(gate) * float(x[token, 1]) * before
        return 2 * a * after, (1 - a) * after

    first = [p + q for p, q in zip(term(0, 0, 0.25), term(0, 1, 0.75), strict=True)]
    expected = torch.tensor([first, term(1, 1, 0.5), (0.0, 0.0)])
    y = moe_reference(x, ids, weights, lambda e: tiny_expert(e + 1.0), problem(routing=routing))
    torch.testing.assert_close(y, expected)


def test_only_experts_that_are_hit_are_asked_for_and_no_tokens_give_no_rows() -> None:
    asked = []

    def dense(expert: int) -> DenseExpert:
        asked.append(expert)
        return tiny_expert(1.0)

    ids = torch.tensor([[3, -1], [3, 1]], dtype=torch.int32)
    moe_reference(torch.ones(2, 2), ids, torch.ones(2, 2), dense, problem())
    assert asked == [1, 3]
    empty = torch.empty(0, 2)
    assert moe_reference(empty, empty.int(), empty, dense, problem()).shape == (0, 2)


def test_router_logits_are_linear_and_in_fp32() -> None:
    router = Router(torch.tensor([[1.0, 2.0]]).bfloat16(), torch.tensor([0.5]).bfloat16())
    logits = router.logits(torch.tensor([[3.0, 4.0]]).bfloat16())
    assert logits.dtype == torch.float32 and logits.tolist() == [[11.5]]
    with pytest.raises(UsageError, match="width 2, got 3"):
        router.logits(torch.zeros(1, 3))
