"""Cases that run by default, and those that only --slow runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_nth(cases: Iterable[Any], n: int, first: int = 0) -> list[Any]:
    """The cases of a sweep, all but each `n`-th from `first` on marked slow; tuples are the values of several
    parameters, and cases of `pytest.param` keep their names and marks. Tests of equal cases begin at others.

    Example:
        >>> every_nth(["a", "b", "c"], 2)[1].marks[0].name
        'slow'
    """
    return [
        pytest.param(*values, marks=(*marks, pytest.mark.slow) if place % n != first else marks, id=name)
        for place, (values, marks, name) in enumerate(map(_parts, cases))
    ]


def in_turn(cases: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Each case with each of the others; by default with one of them, which take turns.

    Example:
        >>> [it.values for it in in_turn("abc", (1, 2)) if not it.marks]
        [('a', 1), ('b', 2), ('c', 1)]
    """
    others = list(others)
    return [
        pytest.param(*_parts(case)[0], *_parts(other)[0], marks=pytest.mark.slow if slow else ())
        for turn, case in enumerate(cases)
        for place, other in enumerate(others)
        for slow in [place != turn % len(others)]
    ]


def _parts(case: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], str | None]:
    """The values, marks and name of a case, which may be one of `pytest.param`."""
    if hasattr(case, "marks"):
        return tuple(case.values), tuple(case.marks), case.id
    return case if isinstance(case, tuple) else (case,), (), None
