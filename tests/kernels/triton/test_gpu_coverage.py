"""What the tests on a GPU walk through, which is known without one: every family, every kind of tile."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from devtools.inspection.shipped_kernels import covering_tiles

from moectl.kernels.triton.hopper.tma import TMA_FAMILY
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.problem.schemes import MXFP4, int_format
from support.kernel_cases import nearly, probe, surplus
from support.kernel_grid import FEWER_CASES, FORMATS

from .hopper import test_gpu_tma as rows
from .test_gpu_formats import PROBES, kind, launches_in, tiles_in
from .test_gpu_stability import LAYERS, tiles_of

IN_TILES = tuple(name for name in FAMILIES if name != "tma")
"""Families that read weights in tiles; `hopper/test_gpu_tma` has the layers in rows."""


def values(tiles: list[Any]) -> set[tuple[str, Any]]:
    return {item for tile in tiles for item in asdict(kind(tile)).items()}


@pytest.mark.parametrize("family", IN_TILES)
def test_the_grid_has_every_tile_of_a_family(family: str) -> None:
    there = {kind(tile) for case in FEWER_CASES for tile in tiles_in(family, case.problem)}
    taken = {kind(it.tile) for launches in launches_in(FEWER_CASES, family).values() for it in launches}
    assert taken and taken == there


@pytest.mark.parametrize("family", IN_TILES)
def test_repetitions_have_every_kind_of_tile(family: str) -> None:
    there = [tile for problem in LAYERS.values() for tile in FAMILIES[family].candidates(problem)]
    taken = [tile for name in LAYERS for tile in tiles_of(name, family)]
    assert taken and values(taken) == values(there)


@pytest.mark.parametrize("family", IN_TILES)
@pytest.mark.parametrize("name", LAYERS)
def test_few_tiles_have_every_value_of_every_field(name: str, family: str) -> None:
    tiles = list(FAMILIES[family].candidates(LAYERS[name]))
    few = covering_tiles(tiles)
    assert len(few) <= len(tiles) and values(few) == values(tiles)
    assert covering_tiles([]) == []


@pytest.mark.parametrize("family", IN_TILES)
def test_probes_have_every_family(family: str) -> None:
    assert sum(launch.family == family for _, _, launch in PROBES) >= 4
    assert {weight for weight, _, _ in PROBES} == set(FORMATS)


@pytest.mark.parametrize("family", ["stream", "warpwise"])
def test_a_probe_with_a_surplus_sees_a_wrong_code_and_a_wrong_scale(family: str) -> None:
    times = surplus(family, probe(FORMATS[1], ("bf16", "BF16")))
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-8, 8, (64, 64), generator=generator).double() / 64
    squares, wrong = weights.relu().square(), weights.clone()
    assert times == 136 and nearly(squares.bfloat16(), squares, times)
    wrong[5, 7] += 1 / 64 if weights[5, 7] >= 0 else 1
    assert not nearly(wrong.relu().square().bfloat16(), squares, times)
    assert not nearly((squares * 1.02).bfloat16(), squares, times)


def test_which_sums_have_a_surplus() -> None:
    def of(family: str, bits: int, dtype: str, zero_point: bool = False) -> int:
        return surplus(family, probe(int_format(bits, 64, zero_point=zero_point), (dtype, "BF16")))

    assert surplus("stream", probe(MXFP4, ("bf16", "BF16"))) == of("mid", 4, "bf16") == 0
    assert of("stream", 8, "bf16") == 0 and of("stream", 8, "fp16") == 1152
    assert of("warpwise", 4, "bf16", zero_point=True) == 143


def tiles_run_by(test: Any, scheme: str) -> set[str]:
    """The names of tiles with which a test of layers in rows is parametrized for a scheme."""
    (mark,) = (it for it in test.pytestmark if it.name == "parametrize" and it.args[0] == ("scheme", "tile"))
    return {tile for name, tile in mark.args[1] if name == scheme}


@pytest.mark.parametrize("scheme", ["plain", *rows.W8A8])
def test_every_launch_of_layers_in_rows_has_a_name_and_runs(scheme: str) -> None:
    problem = replace(rows.LAYER, scheme=scheme).problem
    there = list(TMA_FAMILY.candidates(problem))
    names = [rows.name_of(tile) for tile in there]
    assert len(set(names)) == len(names)
    assert set(rows.few(scheme)) <= set(names)
    whole = scheme in ("plain", "block", "channel and token")
    assert tiles_run_by(rows.test_every_tile_agrees, scheme) == set(names if whole else ())
    repeated = tiles_run_by(rows.test_a_hundred_repetitions_and_a_graph_with_other_routings, scheme)
    assert repeated == set(names if whole else rows.few(scheme))


def test_few_tiles_of_layers_in_rows_have_both_kinds_of_sums() -> None:
    for scheme in rows.W8A8:
        tiles = TMA_FAMILY.candidates(replace(rows.LAYER, scheme=scheme).problem)
        sums = {tile.fast_sums for tile in tiles if rows.name_of(tile) in rows.few(scheme)}
        assert sums == {tile.fast_sums for tile in tiles}
