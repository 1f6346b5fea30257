"""The kernels of weights in rows: which tiles fit which layers, the rows of a copy, the rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for
from devtools.inspection.published_kernels import IN_ROWS, layer_without_weights

from moectl.kernels.choice.tma_launches import (
    TmaTile,
    launch_registers,
    registers,
)
from moectl.kernels.triton.hopper.tma import (
    TMA_FAMILY,
    rows_descriptor,
    swept_together,
    tokens_descriptor,
)
from moectl.kernels.triton.row_matrix import RowMatrix
from moectl.kernels.triton.triton_runner import choose_shipped
from moectl.problem.moe_problem import SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import FP8_ACT_TOKEN, FP8_BLOCK, FP8_CHANNEL, NVFP4, Scheme
from support.row_cases import SCHEMES

QWEN, QWEN_FP8 = (layer_without_weights(model).problem for model in IN_ROWS)
W8A16 = replace(QWEN_FP8, scheme=Scheme(FP8_BLOCK))
QWEN_CHANNEL = replace(QWEN, scheme=Scheme(FP8_CHANNEL, FP8_ACT_TOKEN))


@pytest.mark.parametrize("problem", [QWEN, QWEN_FP8], ids=IN_ROWS)
def test_layers_have_tiles_for_all_widths(problem: MoEProblem) -> None:
    tiles = TMA_FAMILY.candidates(problem)
    assert {tile.tokens for tile in tiles} >= {8, 16, 32, 64, 96, 160}
    assert all(not TMA_FAMILY.fits(problem, tile) and tile.stages >= 3 for tile in tiles)


def test_layers_with_a_bias_have_no_products_with_tokens_as_rows() -> None:
    turned = [
        {tile.turned for tile in TMA_FAMILY.candidates(problem)}
        for problem in (QWEN_FP8, replace(QWEN_FP8, bias=True))
    ]
    assert turned == [{0, 1}, {0}]


@pytest.mark.parametrize("problem", [QWEN, QWEN_FP8], ids=IN_ROWS)
def test_few_tokens_take_narrow_tiles_and_many_wide_ones(problem: MoEProblem) -> None:
    with compiling_for(OFFLINE_GPUS[90]):
        chosen = [choose_shipped(problem, tokens, torch.device("cuda")) for tokens in (1, 16384)]
    assert [launch.family for launch in chosen] == ["tma", "tma"]
    assert chosen[0].tile.tokens == 8 and chosen[1].tile.tokens >= 96


OF_ALL_SUMS = ("plain", "block", "channel and token", "block, 16-bit tokens", "group and token, INT4")
TILES = [
    (scheme, tile)
    for scheme in OF_ALL_SUMS
    for tile in TMA_FAMILY.candidates(replace(QWEN, scheme=SCHEMES[scheme]))
]


@pytest.mark.parametrize(("scheme", "tile"), TILES, ids=str)
def test_threads_of_a_multiprocessor_share_its_registers(scheme: str, tile: TmaTile) -> None:
    for stage in (1, 2):
        working, loading, copying = registers(replace(QWEN, scheme=SCHEMES[scheme]), tile, stage)
        at_first = launch_registers(tile)
        apart = tile.loaders == 4  # then the weight loader is in a warpgroup of its own
        groups = tile.workers + (2 if apart else 1)
        assert tile.programs * 128 * groups * at_first <= 65536
        assert working * tile.workers + loading + (copying if apart else 0) <= at_first * groups
        assert working % 8 == loading % 8 == copying % 8 == 0 and (apart or loading == copying)


def test_tokens_in_a_row_are_copied_in_the_batches_of_a_tile() -> None:
    x = torch.empty(70, 96, dtype=torch.bfloat16)
    for tokens, rows in ((64, 64), (96, 32), (160, 32), (192, 64)):
        made = tokens_descriptor(x, TmaTile(tokens, 2, 1, 3))
        assert made.block_shape == [rows, 128] and list(made.shape) == [70, 192] and tokens % rows == 0


@pytest.mark.parametrize("programs", [132, 114, 78, 131, 5, 1])
def test_no_program_gets_tiles_of_one_kind_alone(programs: int) -> None:
    """Full and last tiles alternate within what sweeps together; a program takes every so many-th tile, where
    it takes none from a counter."""
    plain, turned = (TmaTile(128, 2, 2, 4, group_m=4, turned=turned) for turned in (0, 1))
    assert swept_together(plain, programs) == 4
    together = swept_together(turned, programs)
    taken = {tile % together for tile in range(0, programs * together, programs)}
    assert 4 <= together <= 7 and taken == set(range(together))


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    tile = TmaTile(16, 2, 1, 4)
    assert not TMA_FAMILY.fits(QWEN, tile)
    for problem, other, reason in (
        (QWEN, replace(tile, tokens=20), "not a supported tile"),
        (QWEN, replace(tile, workers=3), "not a supported tile"),
        (QWEN, replace(tile, loaders=3), "not a supported tile"),
        (QWEN, replace(tile, stages=1), "two stages"),
        (QWEN, replace(tile, stages=40), "shared memory"),
        (QWEN, replace(tile, tokens=256, blocks_m=2), "registers"),
        (QWEN_FP8, replace(tile, tokens=256), "registers"),
        (QWEN_CHANNEL, TmaTile(128, 2, 2, 4, fast_sums=1, turned=1), "scales in blocks"),
        (replace(QWEN_FP8, scheme=Scheme(FP8_BLOCK, FP8_ACT_TOKEN)), tile, "or of neither"),
        (replace(QWEN_FP8, scheme=Scheme(FP8_CHANNEL, QWEN_FP8.scheme.act)), tile, "or of neither"),
        (QWEN_FP8, TmaTile(64, 2, 2, 4, turned=1), "128 tokens"),
        (replace(QWEN_FP8, bias=True), TmaTile(128, 2, 2, 4, turned=1), "gated layers without biases"),
        (replace(QWEN, dims=Dims(200, 96)), tile, "hidden size is 200"),
        (replace(QWEN, dims=Dims(224, 72)), tile, "intermediate size is 72"),
        (replace(QWEN, scheme=Scheme(NVFP4)), tile, "nvfp4"),
        (W8A16, TmaTile(128, 2, 2, 3), "decoded weights"),
        (replace(W8A16, bias=True), TmaTile(96, 2, 1, 4), "decoded weights"),
        (replace(W8A16, routing=Routing(weight_on_input=True)), TmaTile(96, 2, 1, 4), "decoded weights"),
        (replace(W8A16, activation=SWIGLU_OAI), TmaTile(96, 2, 1, 4), "decoded weights"),
        (replace(W8A16, scheme=Scheme(FP8_CHANNEL)), TmaTile(64, 2, 1, 4, fast_sums=1), "for FP8 tokens"),
        (replace(QWEN, activation=Activation("gelu")), tile, "activation"),
    ):
        assert reason in TMA_FAMILY.fits(problem, other)


@pytest.mark.parametrize("gated", [True, False])
def test_a_copy_brings_eight_gates_and_their_eight_ups(gated: bool) -> None:
    """Rows of a block in the order that the epilogue needs, and nothing of the next expert."""
    experts, n, k = 3, 160, 32
    numbers = torch.arange(experts * n).view(experts, n, 1) * torch.ones(1, 1, k, dtype=torch.int64)
    m = RowMatrix(numbers.to(torch.bfloat16), None, None, None, n, k)
    made = rows_descriptor(m, gated, 2)
    assert made.block_shape == [1, 8, 2, 8, 128]
    rows = numbers.to(torch.int16).view(torch.uint8).view(torch.int16).flatten()
    strides = [stride // 2 for stride in made.strides[:-1]] + [1]
    seen = rows.as_strided([*made.shape[:-1], 1], strides)[..., 0]
    assert seen.shape == (experts, n // 16, 2, 8)
    for expert in range(experts):
        for group in range(n // 16):
            first, second = (8 * group, n // 2 + 8 * group) if gated else (16 * group, 16 * group + 8)
            assert seen[expert, group, 0].tolist() == [expert * n + first + i for i in range(8)]
            assert seen[expert, group, 1].tolist() == [expert * n + second + i for i in range(8)]


@pytest.mark.parametrize("problem", [QWEN, QWEN_FP8], ids=IN_ROWS)
def test_rules_choose_them_on_hopper_alone(problem: MoEProblem) -> None:
    for arch, family in ((90, "tma"), (80, "grouped"), (100, "grouped")):
        with compiling_for(OFFLINE_GPUS[arch]):
            launch = choose_shipped(problem, 4096, torch.device("cuda"))
        assert launch.family == family


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize("mixed", ["block and token", "block, static", "channel, tokens in groups"])
def test_unlike_scales_of_weights_and_tokens_run_with_the_portable_kernels(mixed: str, tokens: int) -> None:
    with compiling_for(OFFLINE_GPUS[90]):
        launch = choose_shipped(replace(QWEN, scheme=SCHEMES[mixed]), tokens, torch.device("cuda"))
    assert launch.family in ("decode", "grouped")


def test_sizes_that_are_no_multiples_of_16_run_with_the_portable_kernels() -> None:
    odd = replace(QWEN, dims=Dims(200, 72))
    with compiling_for(OFFLINE_GPUS[90]):
        assert choose_shipped(odd, 4096, torch.device("cuda")).family == "grouped"


def test_tuning_measures_tiles_of_about_the_tokens_of_an_expert() -> None:
    for problem, per_expert, widths in (
        (QWEN, 1, {8, 16}),
        (QWEN, 8, {8, 16, 32, 64}),
        (QWEN, 64, {64, 96, 112, 128, 160, 192}),
        (W8A16, 8, {8, 16, 32, 64}),
        (W8A16, 500, {96, 128}),
    ):
        tiles = TMA_FAMILY.candidates(problem)
        assert {tile.tokens for tile in tiles if TMA_FAMILY.suits(problem, tile, per_expert)} == widths


@pytest.mark.parametrize(("experts", "groups"), [(128, {4}), (65, {4}), (64, {1, 4}), (16, {1, 4})])
def test_turned_tiles_sweep_several_token_tiles_of_many_experts(experts: int, groups: set[int]) -> None:
    """Of those that a rank has."""
    problem = replace(QWEN_FP8, local_experts=experts)
    assert {tile.group_m for tile in TMA_FAMILY.candidates(problem) if tile.turned} == groups
