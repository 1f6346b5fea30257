"""The kernels with tiles of many widths on a GPU: of every width, full and not, of several formats."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.prefill_launches import PROMISING, UNIT
from moectl.kernels.triton.hopper.mid import MID_FAMILY
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.problem.moe_problem import Dims
from moectl.problem.schemes import FULL, Scheme, int_format
from support import kernel_cases as cases
from support.random_layers import GPT_OSS, KIMI, QWEN, inputs_of, judged, random_layer

pytestmark = pytest.mark.gpu

INT8 = Scheme(int_format(8, 32, zero_point=True))
WHOLE_ROWS = Scheme(int_format(4, FULL))
LAYERS = {
    "mxfp4": replace(GPT_OSS, dims=Dims(352, 160)),
    "int4 group 32": replace(KIMI, dims=Dims(320, 192)),
    "int4 group 128 fp16": replace(QWEN, dtype="fp16", scheme=Scheme(int_format(4, 128, "F16"))),
    "int4 of whole rows, sizes no multiples of 32": replace(KIMI, dims=Dims(208, 80), scheme=WHOLE_ROWS),
    "int8 with zero points and a bias": replace(KIMI, scheme=INT8, bias=True),
}


def tokens_by_expert(most: int) -> list[int]:
    """Every width up to `most` units: full, one token less, one token in the last unit; and several tiles."""
    short = (0, 1, UNIT - 1)
    counts = [UNIT * units - less for units in range(1, most + 1) for less in short]
    return [0, *counts, UNIT * most + 1, 3 * UNIT * most - 7]


def launches() -> list[Launch]:
    """Every kind of tile of the two families; the length of a ring is that of the first layer."""
    tiles = (tile for layer in LAYERS.values() for tile in MID_FAMILY.candidates(layer))
    kinds = {replace(tile, stages=0): tile for tile in reversed(list(tiles))}
    return [
        *(Launch("prefill", tile) for tile in PROMISING),
        *(Launch("mid", tile) for tile in kinds.values()),
    ]


def named(launch: Launch) -> str:
    return f"{launch.family} {'x'.join(map(str, astuple(launch.tile)))}"


def most_tokens(tile: Any) -> int:
    return int(tile.tokens_x16 * UNIT if hasattr(tile, "tokens_x16") else tile.tokens)


@pytest.mark.parametrize("launch", launches(), ids=named)
@pytest.mark.parametrize("name", LAYERS)
def test_tiles_of_every_width(name: str, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_family = FAMILIES[launch.family]
    if not kernel_family.runs_on(torch.device("cuda")):
        pytest.skip(f"the {launch.family} kernels are for SM90")
    if kernel_family.fits(LAYERS[name], launch.tile):
        tiles = {replace(tile, stages=0): tile for tile in kernel_family.candidates(LAYERS[name])}
        if launch.family == "prefill" or replace(launch.tile, stages=0) not in tiles:
            pytest.skip(f"it takes no such layer: {kernel_family.fits(LAYERS[name], launch.tile)}")
        launch = replace(launch, tile=tiles[replace(launch.tile, stages=0)])
    counts = tokens_by_expert(most_tokens(launch.tile) // UNIT)
    problem = replace(LAYERS[name], experts=len(counts), local_experts=len(counts), top_k=1)
    assert not kernel_family.fits(problem, launch.tile)
    cases.poison_new_memory(monkeypatch)
    layer = random_layer(problem)
    prepared = layer.prepared("moectl", "cuda")
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=generator)].int()[:, None]
    inputs = replace(inputs_of(problem, len(ids), device="cuda"), ids=ids.cuda())
    y = cases._run(prepared, inputs, launch)
    result = judged(layer, prepared, y, inputs)
    assert result.ok, result
