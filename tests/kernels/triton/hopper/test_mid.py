"""The grouped kernels for some tokens an expert: which tiles fit which layers, and their resources."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devtools.inspection.offline_gpu import OFFLINE_GPUS
from devtools.inspection.published_kernels import MODELS, layer_without_weights
from devtools.inspection.shipped_kernels import inspect

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_plan import CandidateLaunch
from moectl.kernels.choice.mid_launches import REGISTERS, WIDTHS, MidTile, registers, shared_bytes
from moectl.kernels.choice.tile_family import SPLITS
from moectl.kernels.triton.hopper.gemm_spec import exact_weights
from moectl.kernels.triton.hopper.mid import MID_FAMILY, _variant, launch_registers
from moectl.kernels.triton.hopper.prefill import PREFILL_FAMILY
from moectl.kernels.triton.kernel_family import KernelFamily, layer_of
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import Activation, Dims
from moectl.problem.padding import pad
from moectl.problem.schemes import FULL, Scheme, int_format

H200 = OFFLINE_GPUS[90]
GPT_OSS = "openai/gpt-oss-120b"
KIMI = "moonshotai/Kimi-K2-Thinking"


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_tiles_for_all_widths(model: str) -> None:
    problem = layer_without_weights(model).problem
    tiles = MID_FAMILY.candidates(problem)
    assert {tile.tokens for tile in tiles} == {16, 32, 64, 96, 128}
    assert all(not MID_FAMILY.fits(problem, tile) for tile in tiles)


@pytest.mark.parametrize("place", REGISTERS)
def test_threads_of_a_multiprocessor_share_its_registers(place: tuple[int, int, int, int]) -> None:
    workers, programs, blocks_m, tma_scales = place
    for tokens, (working, loading) in REGISTERS[place].items():
        tile = MidTile(tokens, workers, 4, programs=programs, blocks_m=blocks_m, tma_scales=tma_scales)
        assert tokens in WIDTHS and registers(tile) == (working, loading)
        at_first = launch_registers(tile)
        assert programs * 128 * (workers + 1) * at_first <= 65536
        # What the other warpgroups leave is the first worker's.
        assert (workers + 1) * at_first - (workers - 1) * working - loading >= 0.7 * working


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    problem = layer_without_weights(GPT_OSS).problem
    tile = MidTile(16, 4, 8)
    assert not MID_FAMILY.fits(problem, tile)
    for changed, other, reason in (
        (problem, replace(tile, tokens=20), "not a supported tile"),
        (problem, replace(tile, tokens=128), "registers"),
        (problem, replace(tile, stages=1), "two stages"),
        (problem, replace(tile, stages=40), "shared memory"),
        (
            replace(problem, scheme=Scheme(int_format(4, 64))),
            replace(tile, stages=3, blocks_m=2, tma_scales=1),
            "groups",
        ),
        (replace(problem, dims=Dims(200, 96)), replace(tile, stages=3), "hidden size is 200"),
        (replace(problem, dims=Dims(224, 72)), replace(tile, stages=3), "intermediate size is 72"),
        (replace(problem, dtype="fp16"), tile, "does not support fp16 tokens"),
        (replace(problem, activation=Activation("gelu")), tile, "activation"),
        (
            replace(problem, activation=Activation("situ", beta=4.0)),
            MidTile(128, 3, 4),
            "of situ for 128",
        ),
        (
            replace(problem, scheme=Scheme(int_format(8, 32)), dtype="bf16", bias=True),
            MidTile(64, 2, 3, programs=2),
            "of int8 group 32 with biases for 64 tokens",
        ),
        (problem, replace(tile, split=0), "splits a reduction of 23 steps"),
        (problem, replace(tile, split=24), "splits a reduction of 23 steps"),
    ):
        assert reason in MID_FAMILY.fits(changed, other)


@pytest.mark.parametrize("family", [MID_FAMILY, PREFILL_FAMILY], ids=["mid", "prefill"])
def test_reductions_are_split_where_tiles_are_few(family: KernelFamily) -> None:
    few = replace(layer_without_weights(KIMI).problem, dims=Dims(4096, 14336), experts=8, local_experts=2)
    tiles = family.candidates(pad("moectl-mtile64", few))
    assert {tile.split for tile in tiles} == {1, *SPLITS}
    assert not any(family.fits(few, tile) for tile in tiles)
    for narrow in (replace(few, dims=Dims(4096, 256)), replace(few, experts=384, local_experts=384)):
        assert {tile.split for tile in family.candidates(pad("moectl-mtile64", narrow))} == {1}


def test_one_binary_runs_any_split_or_none() -> None:
    few = replace(layer_without_weights(KIMI).problem, dims=Dims(4096, 14336), experts=8, local_experts=2)
    binaries = {}
    for tile in MID_FAMILY.candidates(few):
        binaries.setdefault(replace(tile, split=1), set()).add(
            CandidateLaunch.each_of(few, Launch("mid", tile))[0].binaries
        )
    assert all(len(its) == 1 for its in binaries.values())


def test_int4_is_folded_with_bf16_scales_and_without_zero_points() -> None:
    layer = layer_of(layer_without_weights(KIMI))
    assert not exact_weights(layer.problem, layer.w13)
    assert exact_weights(replace(layer.problem, dtype="fp16"), layer.w13)
    assert exact_weights(layer.problem, replace(layer.w13, zeros=layer.w13.scales))


@pytest.mark.parametrize("sizes", [Dims(2880, 2880), Dims(352, 96), Dims(208, 80)], ids=str)
def test_what_is_told_of_a_result_divides_its_columns(sizes: Dims) -> None:
    """A size that is rounded down would put results into other rows."""
    scheme = Scheme(int_format(4, FULL))
    problem = pad("moectl-mtile64", replace(layer_without_weights(KIMI).problem, dims=sizes, scheme=scheme))
    layer, tile = layer_of(empty_layer(problem, "moectl")), MidTile(32, 4, 4)
    for stage, columns in ((1, sizes.intermediate), (2, sizes.hidden)):
        unit = _variant(layer, stage, 64, tile).unit
        assert columns % unit == 0 and (columns % 32 or unit == 32)


def test_shared_memory_is_what_was_counted() -> None:
    layer, tile = layer_without_weights(GPT_OSS), MidTile(16, 2, 6)
    counted = shared_bytes(layer.problem, tile)
    for kernel in inspect(layer, 300, Launch("mid", tile), H200):
        if kernel.wgmma:
            assert 0.85 * counted < kernel.shared <= counted
