"""Second GEMMs whose reduction is split among programs, on a GPU: layers of few experts, in every format."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.layer_inputs import make_inputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.padding import pad
from moectl.problem.schemes import FULL, MXFP4, MXFP8, NVFP4, Scheme, int_format
from support.kernel_cases import agrees, poison_new_memory
from support.random_layers import GPT_OSS, KIMI, inputs_of, random_layer
from support.row_cases import RELU2

from .test_gpu_tma import repeats, run, same

pytestmark = pytest.mark.gpu

TILED = {
    "mxfp4, a bias": replace(GPT_OSS, dims=Dims(320, 1472), experts=2, top_k=2),
    "mxfp4 not gated": replace(
        KIMI, dims=Dims(320, 1120), experts=1, top_k=1, scheme=Scheme(MXFP4), activation=RELU2
    ),
    "nvfp4": replace(KIMI, dims=Dims(336, 1520), experts=2, top_k=1, scheme=Scheme(NVFP4)),
    "mxfp8": replace(KIMI, dims=Dims(256, 1504), experts=3, top_k=2, scheme=Scheme(MXFP8)),
    "int4 group 32": replace(KIMI, dims=Dims(320, 1568), experts=2, top_k=2),
    "int4 group 128": replace(
        KIMI, dims=Dims(256, 1664), experts=1, top_k=1, scheme=Scheme(int_format(4, 128))
    ),
    "int8 per channel": replace(
        KIMI, dims=Dims(256, 1504), experts=2, top_k=2, scheme=Scheme(int_format(8, FULL))
    ),
    "weights on the input": replace(
        KIMI, dims=Dims(256, 1504), experts=2, top_k=1, routing=replace(KIMI.routing, weight_on_input=True)
    ),
}
"""Layers of one to three experts; most steps do not divide by the splits, nor columns by steps."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    poison_new_memory(monkeypatch)


def split_launches(family: str, problem: MoEProblem) -> list[Launch]:
    """Of each kind of tile the launch with the most splits, and one with three or two."""
    found: dict[object, list[Launch]] = {}
    for tile in FAMILIES[family].candidates(problem):
        if getattr(tile, "split", 1) > 1:
            found.setdefault(replace(tile, split=1), []).append(Launch(family, tile))
    kinds = [sorted(launches, key=lambda it: it.tile.split) for launches in found.values()]
    return list(dict.fromkeys(launch for it in kinds for launch in (it[-1], it[len(it) // 2])))


SHARES = 4
"""Among how many layers the kinds of a family's tiles are divided; further layers begin again."""


@cache
def split_tiles(name: str) -> list[Launch]:
    """A layer's share of the launches of each family that split."""
    stored, share = pad("moectl-mtile64", TILED[name]), list(TILED).index(name) % SHARES
    return [it for family in ("mid", "prefill") for it in split_launches(family, stored)[share::SHARES]]


@cache
def prepared_tiles(name: str) -> PreparedMoE:
    return random_layer(TILED[name]).prepared("moectl", "cuda")


@pytest.mark.parametrize("tokens", [1, 37, 300])
@pytest.mark.parametrize("name", TILED)
def test_parts_add_up(name: str, tokens: int) -> None:
    launches = split_tiles(name)
    assert {it.family for it in launches} == {"mid", "prefill"}
    for launch in launches:
        agrees(TILED[name], launch, tokens, "cuda")


@pytest.mark.parametrize("name", TILED)
def test_tiles_repeat(name: str) -> None:
    prepared = prepared_tiles(name)
    first, second = (make_inputs(TILED[name], 61, seed, device="cuda") for seed in (1, 2))
    for launch in split_tiles(name):
        repeats(prepared, launch, first, second)


@pytest.mark.parametrize("name", ["nvfp4", "int4 group 32"])
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    prepared = prepared_tiles(name)
    inputs = inputs_of(TILED[name], 23, device="cuda")
    x = inputs.x.clone()
    x[2, 37] = float("nan")
    others = [i for i in range(23) if i != 2]
    for launch in split_tiles(name):
        clean, y = run(prepared, inputs, launch), run(prepared, replace(inputs, x=x), launch)
        assert same(y[others], clean[others]), launch
        assert not torch.isfinite(y[2]).any(), launch
