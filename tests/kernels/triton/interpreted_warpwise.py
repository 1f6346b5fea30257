"""The warpwise kernels under Triton's interpreter; run by `test_interpreter` in a process of its own."""

from __future__ import annotations

from itertools import cycle

import pytest

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.warpwise_launches import WarpwiseTile
from moectl.problem.schemes import WeightFormat
from support import kernel_cases as cases
from support.kernel_grid import CHOICES, FEWER_CASES, FORMATS, Case

LAUNCHES = {
    "8 warps": Launch("warpwise", WarpwiseTile(8, 1, 2, 8, 2, 4)),
    "4 tiles": Launch("warpwise", WarpwiseTile(8, 1, 2, 4, 4, 4)),
    "one launch": Launch("warpwise", WarpwiseTile(8, 1, 2, 4, 4, 4, 1)),
    "each alone": Launch("warpwise", WarpwiseTile(8, 0, 1, 4, 2, 4)),
    "one tile, 16 tokens": Launch("warpwise", WarpwiseTile(16, 1, 1, 4, 1, 2)),
}
INTEGERS = [weight for weight in FORMATS if weight.name == "int4"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.poison_new_memory(monkeypatch)


@pytest.mark.parametrize("case", [case for case in FEWER_CASES if case.weight in INTEGERS][::2], ids=str)
def test_agrees_in_the_grid(case: Case) -> None:
    cases.agrees_in(case, list(LAUNCHES.values())[case.launch % len(LAUNCHES)], "cpu")


@pytest.mark.parametrize(("weight", "floats"), list(zip(INTEGERS[::4], cycle(CHOICES["floats"]))), ids=str)
def test_decodes_exactly(weight: WeightFormat, floats: tuple[str, str]) -> None:
    cases.decodes_exactly(weight, floats, LAUNCHES["4 tiles"], "cpu")


@pytest.mark.parametrize("launch", LAUNCHES)
def test_skips(launch: str) -> None:
    problems = (case.problem for case in FEWER_CASES if case.weight in INTEGERS and case.spread == (9, 6))
    problem = min(problems, key=lambda problem: problem.dims.hidden * problem.dims.intermediate)
    # A block of one row for each assignment is by far the most work here.
    cases.agrees(problem, LAUNCHES[launch], 2 if launch == "each alone" else 5, "cpu")
