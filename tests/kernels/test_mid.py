"""The grouped kernels for some tokens an expert: which tiles fit which layers, and their resources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moectl.inspection import MODELS, layer_without_weights
from moectl.kernels.triton.hopper.mid import (
    MID_REGIME,
    MOST_TOKENS,
    REGISTERS,
    WIDTHS,
    MidTile,
    launch_registers,
    shared_bytes,
)
from moectl.kernels.triton.inspection.shipped import inspect
from moectl.kernels.triton.inspection.standin import STAND_INS
from moectl.kernels.triton.launch import Launch
from moectl.problem import Activation

H200 = STAND_INS[90]
GPT_OSS = "openai/gpt-oss-120b"


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_tiles_for_all_widths(model: str) -> None:
    problem = layer_without_weights(model).problem
    tiles = MID_REGIME.candidates(problem)
    assert {tile.tokens for tile in tiles} == {16, 32, 64, 96, 128}
    assert all(not MID_REGIME.fits(problem, tile) for tile in tiles)


@pytest.mark.parametrize(("workers", "programs"), REGISTERS)
def test_threads_of_a_multiprocessor_share_its_registers(workers: int, programs: int) -> None:
    working, loading = REGISTERS[workers, programs]
    assert programs * 128 * (workers * working + loading) <= 65536
    tile = MidTile(16, workers, 4, programs=programs)
    assert programs * 128 * (workers + 1) * launch_registers(tile) <= 65536
    assert MOST_TOKENS[workers, programs] in WIDTHS


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    problem = layer_without_weights(GPT_OSS).problem
    tile = MidTile(16, 4, 8)
    assert not MID_REGIME.fits(problem, tile)
    for changed, other, reason in (
        (problem, replace(tile, tokens=20), "none of its tiles"),
        (problem, replace(tile, tokens=128), "registers"),
        (problem, replace(tile, stages=1), "no stage to fill"),
        (problem, replace(tile, stages=40), "shared memory"),
        (replace(problem, dtype="fp16"), tile, "no fp16 products"),
        (replace(problem, activation=Activation("situ")), tile, "activation"),
    ):
        assert reason in MID_REGIME.fits(changed, other)


def test_shared_memory_is_what_was_counted() -> None:
    layer, tile = layer_without_weights(GPT_OSS), MidTile(16, 2, 6)
    counted = shared_bytes(layer.problem, tile)
    for kernel in inspect(layer, 300, Launch("mid", tile), H200):
        if kernel.wgmma:
            assert 0.85 * counted < kernel.shared <= counted
