"""Cases that run by default, and those that only --slow runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_nth(cases: Iterable[Any], n: int) -> list[Any]:
    """The cases of a sweep, all but each `n`-th marked slow; tuples are the values of several parameters.

    Example:
        >>> every_nth(["a", "b", "c"], 2)[1].marks[0].name
        'slow'
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if place % n else ()
        )
        for place, case in enumerate(cases)
    ]
