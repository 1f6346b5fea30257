"""What the tests on a GPU walk through, which is known without one: every family, every kind of tile."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from moectl.kernels.triton.inspection.shipped import of_each_kind
from moectl.kernels.triton.runner import REGIMES

from .grid import FEWER_CASES
from .test_gpu_formats import kind, launches_in, tiles_in
from .test_gpu_stability import LAYERS, tiles_of


def values(tiles: list[Any]) -> set[tuple[str, Any]]:
    return {item for tile in tiles for item in asdict(kind(tile)).items()}


@pytest.mark.parametrize("family", REGIMES)
def test_the_grid_has_every_tile_of_a_family(family: str) -> None:
    there = {kind(tile) for case in FEWER_CASES for tile in tiles_in(family, case.problem)}
    taken = {kind(launch.tile) for launch in launches_in(FEWER_CASES, family).values()}
    assert taken and taken == there


@pytest.mark.parametrize("family", REGIMES)
def test_repetitions_have_every_kind_of_tile(family: str) -> None:
    there = [tile for problem in LAYERS.values() for tile in REGIMES[family].candidates(problem)]
    taken = [tile for name in LAYERS for tile in tiles_of(name, family)]
    assert taken and values(taken) == values(there)


@pytest.mark.parametrize("family", REGIMES)
@pytest.mark.parametrize("name", LAYERS)
def test_few_tiles_have_every_value_of_every_field(name: str, family: str) -> None:
    tiles = list(REGIMES[family].candidates(LAYERS[name]))
    few = of_each_kind(tiles)
    assert len(few) <= len(tiles) and values(few) == values(tiles)
    assert of_each_kind([]) == []
