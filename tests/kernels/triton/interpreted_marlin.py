"""The moectl_marlin cases under Triton's interpreter; run by `test_interpreter` in a process of its own."""

from __future__ import annotations

import pytest

from moectl.kernels.triton.sort_and_combine import INTERPRETED
from support import marlin_cases as cases
from support.kernel_cases import poison_new_memory
from support.sampling import every_nth


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


@pytest.mark.parametrize("name", every_nth(cases.FORMATS, 3))
def test_agrees_with_the_reference(name: str) -> None:
    tile = list(cases.TILES.values())[list(cases.FORMATS).index(name) % len(cases.TILES)]
    cases.agrees(cases.FORMATS[name], tile, 3, "cpu")


@pytest.mark.parametrize("tile", every_nth(cases.TILES, 2))
def test_skips_and_crowds(tile: str) -> None:
    cases.agrees(cases.of(32), cases.TILES[tile], 11, "cpu", skip=3)
    cases.crowds(cases.TILES[tile], "cpu")


@pytest.mark.parametrize("zero", [False, True])
def test_every_code_is_right(zero: bool) -> None:
    cases.every_code_is_right(zero, "cpu")
