"""Choices of launches where nothing was measured, and bounds that grids are made of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from devtools.inspection.published_kernels import MODELS, layer_without_weights

from moectl.kernels.choice.launch import token_tiles
from moectl.kernels.choice.launch_plan import launch_for
from moectl.kernels.triton.kernel_family import activation_numbers
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.problem.moe_problem import SWIGLU_OAI, Activation
from moectl.problem.schemes import Scheme, int_format


@pytest.mark.parametrize("model", MODELS)
def test_launches_depend_on_sizes_alone_and_are_legal(model: str) -> None:
    problem = layer_without_weights(model).problem
    for tokens in (1, 2, 3, 8, 9, 63, 64, 65, 500, 2000, 8192, 70_000):
        launch = launch_for(problem, tokens)
        assert not FAMILIES[launch.family].fits(problem, launch.tile)
    assert launch_for(problem, 1).family == "decode"
    assert launch_for(problem, 8192).family == "grouped"


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


IMPOSSIBLE = [
    ("stream", {"depth": 0}, "powers of two"),
    ("stream", {"blocks2": 0}, "powers of two"),
    ("stream", {"tiles": 0}, "one row tile"),
    ("stream", {"split": 0}, "one part of the reduction"),
    ("warpwise", {"rows1": 0}, "a multiple of rows"),
    ("warpwise", {"warps1": 32, "rows1": 2}, "a multiple of rows"),
    ("warpwise", {"tokens": 24}, "must be a power of two"),
    ("mid", {"depth": 3}, "depth must be 1, 2 or 4"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), IMPOSSIBLE)
def test_impossible_tiles_are_refused_with_a_reason(
    family: str, changes: dict[str, int], reason: str
) -> None:
    problem, kernel_family = layer_without_weights("moonshotai/Kimi-K2-Thinking").problem, FAMILIES[family]
    tile = kernel_family.candidates(problem)[0]
    assert not kernel_family.fits(problem, tile)
    assert reason in kernel_family.fits(problem, replace(tile, **changes))


@pytest.mark.parametrize("family", ["stream", "warpwise", "mid", "prefill"])
def test_groups_that_no_tile_of_64_columns_has_are_refused(family: str) -> None:
    problem, kernel_family = layer_without_weights("moonshotai/Kimi-K2-Thinking").problem, FAMILIES[family]
    odd = replace(problem, scheme=Scheme(int_format(4, 96)))
    assert "groups of 32" in kernel_family.fits(odd, kernel_family.candidates(problem)[0])


def test_numbers_of_an_activation_that_has_none() -> None:
    assert activation_numbers(SWIGLU_OAI) == {"alpha": 1.702, "limit": 7.0}
    assert activation_numbers(Activation("silu")) == {"alpha": 1.0, "limit": math.inf}
    # SiLU has no alpha, whatever is said: the reference reads none.
    assert activation_numbers(Activation("silu", alpha=2.0, limit=10.0)) == {"alpha": 1.0, "limit": 10.0}
