"""Numbers as text: ASCII digits, and no more than a number has."""

from __future__ import annotations

import pytest

from moectl.whole_numbers import whole_number
from support.invoking import moectl


@pytest.mark.parametrize(
    "text", ["", "²", "٣", "-1", "+1", " 1", "1_0", "0x1", "1.0", "9" * 19, "9" * 5000, "\ud800"]
)
def test_what_spells_no_number(text: str) -> None:
    assert whole_number(text) is None


def test_numbers() -> None:
    assert [whole_number(text) for text in ("0", "007", "9" * 18)] == [0, 7, int("9" * 18)]
    assert whole_number("123", 2) is None


@pytest.mark.parametrize(
    "options",
    [
        ("--tp", "²"),
        ("--tp", "9" * 5000),
        ("--dp", "1,٣"),
        ("--ep", "²"),
        ("--assume", "hidden=²"),
        ("--assume", "hidden=" + "9" * 5000),
    ],
    ids=lambda words: " ".join(words)[:20],
)
def test_explain_says_so_in_a_sentence(options: tuple[str, ...]) -> None:
    done = moectl("explain", "gpt-oss-20b", "--gpu", "h100", "--offline", *options, code=None)
    assert done.code in (2, 4) and "error:" in done.stderr, done
