"""Choices of launches where nothing was measured, and bounds that grids are made of."""

from __future__ import annotations

import math

import pytest

from moectl.inspection import MODELS, layer_without_weights
from moectl.kernels.triton.launch import is_legal, launch_for, token_tiles
from moectl.kernels.triton.layer import activation_numbers
from moectl.problem import SWIGLU_OAI, Activation


@pytest.mark.parametrize("model", MODELS)
def test_launches_depend_on_sizes_alone_and_are_legal(model: str) -> None:
    problem = layer_without_weights(model).problem
    for tokens in (1, 2, 3, 8, 9, 63, 64, 65, 500, 2000, 8192, 70_000):
        assert is_legal(launch_for(problem, tokens).tile, problem.scheme.weight.group)
    assert launch_for(problem, 1).regime == "decode"
    assert launch_for(problem, 8192).regime == "grouped"


@pytest.mark.parametrize("assignments", [1, 5, 16, 17, 100])
def test_token_tiles_bound_every_routing(assignments: int) -> None:
    experts, tokens = 4, 16
    worst = 0
    for a in range(assignments + 1):
        for b in range(assignments + 1 - a):
            rest = assignments - a - b
            for counts in ((a, b, rest, 0), (a, b, rest // 2, rest - rest // 2)):
                worst = max(worst, sum(-(-count // tokens) for count in counts))
    assert worst <= token_tiles(assignments, experts, tokens) <= worst + 1


def test_numbers_of_an_activation_that_has_none() -> None:
    assert activation_numbers(SWIGLU_OAI) == {"alpha": 1.702, "limit": 7.0}
    assert activation_numbers(Activation("silu")) == {"alpha": 1.0, "limit": math.inf}
    # SiLU has no alpha, whatever is said: the reference reads none.
    assert activation_numbers(Activation("silu", alpha=2.0, limit=10.0)) == {"alpha": 1.0, "limit": 10.0}
