"""The router's kernel on a GPU: every method at many sizes, inside a graph, and the entry that picks it."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels import reference
from moectl.kernels.routing import route
from moectl.kernels.triton import router
from support import router_cases as cases

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases.METHODS)
def test_agrees(name: str, dtype: torch.dtype) -> None:
    for kind in cases.KINDS:
        for tokens in (0, 1, 67):
            cases.agrees(name, kind, tokens, dtype, "cuda")


@pytest.mark.parametrize("name", cases.METHODS)
def test_agrees_at_many_tokens(name: str) -> None:
    cases.agrees(name, "random", 8192, torch.float32, "cuda")
    cases.agrees(name, "large bias", 3000, torch.bfloat16, "cuda")


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("name", cases.METHODS)
def test_any_number_of_warps(name: str, warps: int) -> None:
    for kind in cases.KINDS:
        cases.agrees(name, kind, 20, torch.float32, "cuda", warps)


def test_leaves_out_what_is_out_of_range() -> None:
    cases.leaves_out_what_is_out_of_range("cuda")


def test_takes_rows_with_gaps() -> None:
    cases.takes_rows_with_gaps("cuda")


@pytest.mark.parametrize("name", ["grouped", "hashed", "factors"])
def test_a_captured_call_routes_new_logits(name: str) -> None:
    problem = cases.METHODS[name]
    case = cases.case_of(problem, "random", 64, torch.float32).to("cuda")
    other = cases.case_of(problem, "coarse", 64, torch.float32)
    tensors = {"expert_scale": case.factors, "table": case.table, "token_ids": case.token_ids}
    route(case.logits, problem, case.bias, **tensors)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = route(case.logits, problem, case.bias, **tensors)
    case.logits.copy_(other.logits)
    graph.replay()
    cases.same(found, cases.expected(problem, case))


def test_the_entry_picks_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.METHODS["softmax, renormalized"]
    logits = torch.randn(4, problem.experts, device="cuda")
    called = []
    monkeypatch.setattr(router, "route", lambda *a: called.append("kernel"))
    monkeypatch.setattr(reference, "route", lambda *a, **k: called.append("reference"))
    for given in (logits, logits.bfloat16(), logits.half(), logits.double(), logits.cpu()):
        route(given, problem)
    assert called == ["kernel"] * 3 + ["reference"] * 2
