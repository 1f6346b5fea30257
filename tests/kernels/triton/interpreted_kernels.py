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
PAIRWISE = (0, 1, 3, 6, 8, 10, 12, 13, 15, 17, 18)
"""Places in `FORMATS` of MXFP4, NVFP4, MXFP8 and of eight of the sixteen integer formats."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.poison_new_memory(monkeypatch)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


@pytest.mark.parametrize(
    "case",
    # The first case of each format, and with --slow the others.
    [
        pytest.param(case, id=str(case), marks=pytest.mark.slow if again else ())
        for turn, case in enumerate(FEWER_CASES)
        for again in [any(case.weight == it.weight for it in FEWER_CASES[:turn])]
    ],
)
def test_agrees_in_the_grid(case: Case) -> None:
    cases.agrees_in(case, list(LAUNCHES.values())[case.launch % len(LAUNCHES)], "cpu")


@pytest.mark.parametrize(
    ("weight", "floats"),
    # By default every two of a width, a group size, and zero points or none; with --slow all formats, twice.
    [
        pytest.param(
            *row,
            id=" ".join(map(str, row)),
            marks=() if turn in PAIRWISE else pytest.mark.slow,
        )
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


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_nan_codes_stay_nan(dtype: str) -> None:
    cases.nan_codes_stay_nan(LAUNCHES["grouped 16x64x64"], "cpu", dtype)


def test_no_tokens_and_the_table() -> None:
    cases.no_tokens_and_the_table("cpu")
