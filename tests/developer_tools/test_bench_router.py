"""What `scripts/bench_router` compares with: a model's routing in calls of torch."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels import reference
from support.router_cases import problem_of
from support.scripts import loaded


@pytest.mark.parametrize("name", loaded("bench_router").ROUTINGS)
def test_torch_routes_the_same(name: str) -> None:
    script = loaded("bench_router")
    problem = problem_of(*script.ROUTINGS[name])
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, problem.experts, generator=generator)
    bias = torch.randn(problem.experts, generator=generator) if problem.routing.correction_bias else None
    ids, weights = script.in_torch(logits, problem, bias)
    wanted = reference.route(logits, problem, bias)
    assert torch.equal(ids, wanted[0])
    torch.testing.assert_close(weights, wanted[1])


@pytest.mark.gpu
def test_a_row() -> None:
    ours, theirs, right = loaded("bench_router").row("deepseek-v3", 5)
    assert right and 0 < ours < theirs
