"""The router's cases under Triton's interpreter; run by `test_interpreter` in a process of its own."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels.triton.sort_and_combine import INTERPRETED
from support import router_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinities in numpy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(-77)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", filled)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


def kinds_in_turn() -> list[object]:
    """Every method with random logits and two other kinds in turn; the other kinds are slow tests."""
    others = [kind for kind in cases.KINDS if kind != "random"]
    rows = []
    for turn, name in enumerate(cases.METHODS):
        usual = {"random", others[2 * turn % len(others)], others[(2 * turn + 1) % len(others)]}
        rows += [
            pytest.param(name, kind, marks=() if kind in usual else pytest.mark.slow) for kind in cases.KINDS
        ]
    return rows


@pytest.mark.parametrize(("name", "kind"), kinds_in_turn())
def test_agrees(name: str, kind: str) -> None:
    turn = list(cases.METHODS).index(name) + cases.KINDS.index(kind)
    cases.agrees(name, kind, 4, DTYPES[turn % 3], "cpu")


def test_no_tokens() -> None:
    cases.agrees("grouped", "random", 0, torch.float32, "cpu")


def test_leaves_out_what_is_out_of_range() -> None:
    cases.leaves_out_what_is_out_of_range("cpu")


def test_takes_rows_with_gaps() -> None:
    cases.takes_rows_with_gaps("cpu")
