"""The mid kernels, compiled without a GPU: where their products read tokens, and how they store results."""

from __future__ import annotations

import re
from dataclasses import astuple, replace

import pytest
from devtools.inspection.published_kernels import layer_without_weights

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.mid_launches import WIDTHS, MidTile
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.hopper.mid import MID_FAMILY
from moectl.layer.experts import empty_layer
from moectl.problem.schemes import Scheme, int_format
from support.ptx_places import BOXES, COPIES, READ, Ptx, gemms

GPT_OSS = layer_without_weights("openai/gpt-oss-20b")
KIMI = layer_without_weights("moonshotai/Kimi-K2-Thinking")
INT8 = empty_layer(replace(KIMI.problem, scheme=Scheme(int_format(8, 32, zero_point=True))), "moectl")
ZEROS = empty_layer(replace(KIMI.problem, scheme=Scheme(int_format(4, 32, zero_point=True))), "moectl")
LAYERS = {"mxfp4": GPT_OSS, "int4": KIMI, "int4 with zero points": ZEROS, "int8 with zero points": INT8}


def tiles(layer: PreparedMoE) -> list[MidTile]:
    return [tile for tile in MID_FAMILY.candidates(layer.problem) if not MID_FAMILY.fits(layer.problem, tile)]


def compiled(layer: PreparedMoE, tile: MidTile) -> list[str]:
    """PTX of both GEMMs of a call."""
    return [it["ptx"] for it in gemms(layer, Launch("mid", tile), 1024, "_grouped_gemm_kernel")]


def in_one_array(tile: MidTile) -> int:
    """Tokens of a tile that lie in one array, a power of two; more lie in another."""
    return 1 << (tile.tokens.bit_length() - 1)


def joint(tile: MidTile) -> list[int]:
    """Numbers of columns that are no power of two and whose tokens lie in one array."""
    return [width for width in WIDTHS[tile.tokens] if width & (width - 1) and width < in_one_array(tile)]


def odd_columns_are_one_product(ptx: str, tile: MidTile) -> None:
    """Numbers of columns between powers of two, where their tokens lie in one array."""
    assert all(f"wgmma.mma_async.sync.aligned.m64n{width}k16" in ptx for width in joint(tile))


def tokens_lie_where_products_read(ptx: str, tile: MidTile) -> None:
    """Both begin with shared memory, and go on from piece to piece and from stage to stage alike.

    What TMA brings lies behind all of them. Where a stage has as many bytes of codes as of tokens, the
    compiler may keep the place itself over the edge of a loop, instead of the stage.
    """
    code, piece = Ptx(ptx), 128 * in_one_array(tile)
    stage, pieces = tile.depth * piece, {piece * d for d in range(tile.depth)}
    products = {code.place(register) for register in READ.findall(ptx)}
    assert {place.origin for place in products if place.strides == {stage}} == pieces
    assert all(place.origin in pieces and place.strides in ({stage}, {1}) for place in products)
    tokens = {place.origin for place in map(code.place, COPIES.findall(ptx)) if stage in place.strides}
    assert {origin // piece * piece for origin in tokens} == pieces and pieces < tokens
    boxes = {code.place(register).origin for register in BOXES.findall(ptx)}
    assert min(boxes) >= tile.stages * stage


def stores_are_wide(ptx: str) -> None:
    """Results leave in 16 bytes a thread."""
    stores = re.findall(r"st\.global\S*", ptx)
    assert stores and set(stores) == {"st.global.v4.b32"}


def named(tile: MidTile) -> str:
    return "x".join(map(str, astuple(tile)))


@pytest.mark.slow
def test_products_read_tokens_where_they_were_copied() -> None:
    """Where codes are no less than tokens, both share an array."""
    tile = next(tile for tile in tiles(GPT_OSS) if tile.tokens == 64 and tile.workers == 4)
    for ptx in compiled(GPT_OSS, tile):
        odd_columns_are_one_product(ptx, tile)
        tokens_lie_where_products_read(ptx, tile)
        stores_are_wide(ptx)
        moved = re.sub(r"mov\.b32 \t(%r\d+), global_smem;", r"add.s32 \t\1, global_smem, 1024;", ptx)
        assert moved != ptx
        with pytest.raises(AssertionError):
            tokens_lie_where_products_read(moved, tile)


@pytest.mark.slow
def test_results_are_stored_wide_where_sizes_are_hidden_from_the_compiler() -> None:
    tile = next(tile for tile in tiles(KIMI) if tile.tma_scales and tile.blocks_m == 2)
    for ptx in compiled(KIMI, tile):
        stores_are_wide(ptx)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tile"),
    [(name, tile) for name, layer in LAYERS.items() for tile in tiles(layer)],
    ids=lambda value: value if isinstance(value, str) else named(value),
)
def test_they_are_in_every_tile(name: str, tile: MidTile) -> None:
    layer = LAYERS[name]
    for ptx in compiled(layer, tile):
        stores_are_wide(ptx)
        odd_columns_are_one_product(ptx, tile)
        if joint(tile):
            tokens_lie_where_products_read(ptx, tile)
