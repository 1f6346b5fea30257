"""Since when a release knows a name, and which release dropped it."""

import pytest

from moectl.oracle.name_history import NameHistory

HISTORY = NameHistory(
    {
        "steady": (("0.9.0", ""),),
        "gone": (("0.9.0", "0.24.0"),),
        "new": (("0.31.0", ""),),
        "returned": (("0.20.0", "0.29.0"), ("0.31.0", "0.33.0")),
    }
)


@pytest.mark.parametrize(
    ("release", "known"),
    [
        ("0.9.0", {"steady", "gone"}),
        ("0.23.0.post1", {"steady", "gone", "returned"}),
        ("0.24.0", {"steady", "returned"}),
        ("0.30.0", {"steady"}),
        ("0.32.1", {"steady", "new", "returned"}),
        ("0.33.0", {"steady", "new"}),
    ],
)
def test_names_are_those_between_both_releases(release: str, known: set[str]) -> None:
    assert HISTORY.at(release) == known


@pytest.mark.parametrize(
    ("name", "release", "dropped", "added"),
    [
        ("steady", "0.30.0", "", ""),
        ("gone", "0.23.0", "", ""),
        ("gone", "0.33.0", "0.24.0", ""),
        ("new", "0.30.0", "", "0.31.0"),
        ("returned", "0.30.0", "0.29.0", "0.31.0"),
        ("returned", "0.32.0", "", ""),
        ("returned", "0.33.0", "0.33.0", ""),
        ("unheard", "0.33.0", "", ""),
    ],
)
def test_the_release_that_dropped_or_added_a_name(name: str, release: str, dropped: str, added: str) -> None:
    assert HISTORY.dropped(name, release) == dropped
    assert HISTORY.added(name, release) == added
