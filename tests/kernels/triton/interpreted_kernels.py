"""The kernel cases under Triton's interpreter; run by `test_interpreter` in a process of its own."""

from __future__ import annotations

from itertools import cycle

import pytest

from moectl.kernels.triton.triton_runner import INTERPRETED
from moectl.problem.schemes import WeightFormat
from support import kernel_cases as cases
from support.kernel_grid import CHOICES, FEWER_CASES, FORMATS, Case

LAUNCHES = cases.LAUNCHES
FLOATS = CHOICES["floats"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.poison_new_memory(monkeypatch)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


@pytest.mark.parametrize("case", FEWER_CASES, ids=str)
def test_agrees_in_the_grid(case: Case) -> None:
    cases.agrees_in(case, list(LAUNCHES.values())[case.launch % len(LAUNCHES)], "cpu")


@pytest.mark.parametrize(
    ("weight", "floats"),
    [
        pytest.param(*row, id=" ".join(map(str, row)), marks=pytest.mark.slow if turn >= len(FORMATS) else ())
        for turn, row in enumerate(zip(2 * FORMATS, cycle(FLOATS)))
    ],
)
def test_decodes_exactly(weight: WeightFormat, floats: tuple[str, str]) -> None:
    cases.decodes_exactly(weight, floats, LAUNCHES["grouped 64x128x64 tails"], "cpu")


@pytest.mark.parametrize("launch", ["decode 16x128x64", "grouped 16x64x64"])
@pytest.mark.parametrize("case", [cases.skips, cases.one_rank])
def test_odd_routings(case: object, launch: str) -> None:
    case(LAUNCHES[launch], "cpu")  # type: ignore[operator]


def test_every_scale_is_right() -> None:
    cases.every_scale_is_right(LAUNCHES["decode 16x128x64"], "cpu")


def test_no_tokens_and_the_table() -> None:
    cases.no_tokens_and_the_table("cpu")
