"""The kernel cases under Triton's interpreter; run by `test_interpreter` in a process of its own."""

from __future__ import annotations

import pytest

from moectl.kernels.triton.runner import INTERPRETED

from . import kernel_cases as cases

LAUNCHES = cases.LAUNCHES


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.poison_new_memory(monkeypatch)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


@pytest.mark.parametrize(
    ("family", "launch", "tokens"),
    [
        ("gpt-oss", "decode 16x64x128 split 4", 1),
        ("gpt-oss", "decode 16x128x64", 20),
        ("gpt-oss", "grouped 16x64x64", 20),
        ("gpt-oss", "grouped 64x128x64 tails", 30),
        ("kimi", "decode 16x64x128 split 4", 3),
        ("kimi", "grouped 64x128x64 tails", 20),
        ("qwen", "decode 16x128x64", 3),
        ("qwen", "grouped 16x64x64", 20),
        ("group 64", "decode 16x64x128 split 4", 2),
    ],
)
def test_agrees_with_the_reference(family: str, launch: str, tokens: int) -> None:
    cases.agrees(family, LAUNCHES[launch], tokens, "cpu")


@pytest.mark.parametrize("family", cases.ODD_SIZES)
@pytest.mark.parametrize("launch", ["decode 16x64x128 split 4", "grouped 64x128x64 tails"])
def test_agrees_at_odd_sizes(family: str, launch: str) -> None:
    cases.agrees(cases.ODD_SIZES[family], LAUNCHES[launch], 5, "cpu")


@pytest.mark.parametrize("launch", ["decode 16x128x64", "grouped 16x64x64"])
@pytest.mark.parametrize("case", [cases.skips, cases.crowds, cases.weighs_the_input, cases.one_rank])
def test_odd_routings(case: object, launch: str) -> None:
    case(LAUNCHES[launch], "cpu")  # type: ignore[operator]


def test_every_scale_is_right() -> None:
    cases.every_scale_is_right(LAUNCHES["decode 16x128x64"], "cpu")


def test_no_tokens_and_the_table() -> None:
    cases.no_tokens_and_the_table("cpu")
