"""The kernels of weights in rows, compiled without a GPU: what their products read, and how they store."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import astuple, replace

import pytest
from devtools.inspection.handovers import LOADS, NEVER, late_reads
from devtools.inspection.hazards import WGMMA
from devtools.inspection.kernel_report import disassembled
from devtools.inspection.offline_gpu import OFFLINE_GPUS
from devtools.inspection.published_kernels import IN_ROWS, layer_without_weights
from devtools.inspection.shipped_kernels import inspect

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.tma_launches import TmaTile, shared_bytes
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.hopper.tma import TMA_FAMILY
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import SWIGLU_OAI, Activation, Routing
from moectl.problem.schemes import (
    FP8_ACT_TENSOR,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    INT8_ACT_TOKEN,
    Scheme,
    WeightFormat,
    int_format,
)
from support.ptx_places import BOXES, COPIES, Ptx, gemms, launched_gemms
from support.sampling import every_nth

QWEN, BLOCKS = map(layer_without_weights, IN_ROWS)
LAYERS = {
    "bf16": QWEN,
    "fp16, bias, relu2": empty_layer(
        replace(QWEN.problem, dtype="fp16", bias=True, activation=Activation("relu2", gated=False)), "moectl"
    ),
    "fp8 block": BLOCKS,
    "fp8 channel": empty_layer(replace(QWEN.problem, scheme=Scheme(FP8_CHANNEL, FP8_ACT_TOKEN)), "moectl"),
    "fp8 block, 16-bit tokens": empty_layer(replace(BLOCKS.problem, scheme=Scheme(FP8_BLOCK)), "moectl"),
    "fp8 channel, 16-bit tokens": empty_layer(replace(QWEN.problem, scheme=Scheme(FP8_CHANNEL)), "moectl"),
    "int8": empty_layer(replace(QWEN.problem, scheme=Scheme(int_format(8, FULL), INT8_ACT_TOKEN)), "moectl"),
    "int4": empty_layer(replace(QWEN.problem, scheme=Scheme(int_format(4, 128), INT8_ACT_TOKEN)), "moectl"),
    "int4, fp32 scales": empty_layer(
        replace(QWEN.problem, scheme=Scheme(int_format(4, 128, "F32"), INT8_ACT_TOKEN)), "moectl"
    ),
    "int4, bias": empty_layer(
        replace(
            QWEN.problem,
            scheme=Scheme(int_format(4, 128), INT8_ACT_TOKEN),
            bias=True,
            activation=SWIGLU_OAI,
        ),
        "moectl",
    ),
    "fp8 tensor": empty_layer(replace(QWEN.problem, scheme=Scheme(FP8_TENSOR, FP8_ACT_TENSOR)), "moectl"),
}

DECODED = (
    "fp8 block, 16-bit tokens",
    "fp8 channel, 16-bit tokens",
    "int4",
    "int4, fp32 scales",
    "int4, bias",
)
"""Those whose weights products read from registers."""

ROWS = re.compile(r"add\.u32 rows, low, (%r\d+);")
TOKENS = re.compile(r"add\.u32 tokens, low, (%r\d+);")
"""Where `shared_wgmma` adds an operand's place to the beginning of shared memory."""


def compiled(layer: PreparedMoE, tile: TmaTile) -> list[str]:
    """PTX of both GEMMs of a call, without faults."""
    return [it["ptx"] for it in gemms(layer, Launch("tma", tile), 64, "_rows_gemm_kernel")]


def products_have_all_widths(ptx: str, layer: PreparedMoE, tile: TmaTile) -> None:
    """One for each number of columns, over 16 columns of 16 bits or 32 of 8, added in fp32 or int32."""
    kind = {"bf16": "bf16", "fp16": "f16"}[layer.problem.dtype]
    of_codes = {"fp8": "k32.f32.e4m3.e4m3", "int8": "k32.s32.s8.s8"}
    types = of_codes.get(layer.problem.scheme.weight.name, f"k16.f32.{kind}.{kind}")
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(k\S+)", ptx))
    widths = {128} if tile.turned else tile.widths
    assert found == {(str(width), types) for width in widths}


def operands_lie_where_products_read(ptx: str, tile: TmaTile) -> None:
    """Rows from the start of shared memory on, in boxes of TMA, then tokens, in boxes or 16 bytes at once.

    Turned products read tokens as their first operand.
    """
    code = Ptx(ptx)
    piece, columns = 128 * tile.rows, 128 * tile.tokens
    first = tile.stages * tile.depth * piece
    boxes = {code.place(register) for register in BOXES.findall(ptx)}
    of_rows = {place for place in boxes if place.origin < first}
    assert {place.origin for place in of_rows} == {piece * d for d in range(tile.depth)}
    assert all(place.strides == {tile.depth * piece} for place in of_rows)
    operands = (TOKENS, ROWS) if tile.turned else (ROWS, TOKENS)
    rows, tokens = ({code.place(name).origin for name in it.findall(ptx)} for it in operands)
    own = 128 * 64 * tile.blocks_m
    assert min(rows) == 0 and all(origin < tile.depth * piece and origin % 8192 == 0 for origin in rows)
    assert {origin // own * own % piece for origin in rows} == {own * me for me in range(tile.workers)}
    block = 128 * 64 if tile.turned else columns
    assert min(tokens) == first and all((origin - first) % block == 0 for origin in tokens)
    assert not tile.turned or {origin - first for origin in tokens} == {0, block}
    copies = {code.place(register) for register in COPIES.findall(ptx)} | boxes - of_rows
    places = {place.origin for place in copies}
    assert first == min(places) and max(places) < first + tile.depth * columns


def stores_are_wide(ptx: str) -> None:
    """Results leave in 16 bytes a thread, and scales of codes one by one."""
    stores = Counter(re.findall(r"st\.global\S*", ptx))
    assert stores.pop("st.global.v4.b32")
    scaled = "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert set(stores) == ({"st.global.b32"} if scaled else set())


def named(tile: TmaTile) -> str:
    return "x".join(map(str, astuple(tile)))


SMALLEST, TWO_WORKERS = TmaTile(8, 1, 1, 4, 2, programs=2), TmaTile(16, 2, 2, 3)


@pytest.mark.parametrize(
    ("name", "tile"),
    every_nth(
        [
            ("bf16", SMALLEST),
            ("fp8 channel", SMALLEST),
            ("int8", SMALLEST),
            ("int8", TWO_WORKERS),
            ("fp8 block", TWO_WORKERS),
            ("fp16, bias, relu2", SMALLEST),
        ],
        2,
    ),
)
def test_products_read_rows_and_tokens_where_they_were_copied(name: str, tile: TmaTile) -> None:
    layer = LAYERS[name]
    for ptx in compiled(layer, tile):
        products_have_all_widths(ptx, layer, tile)
        operands_lie_where_products_read(ptx, tile)
        stores_are_wide(ptx)
        moved = re.sub(r"mov\.b32 \t(%r\d+), global_smem;", r"add.s32 \t\1, global_smem, 1024;", ptx)
        assert moved != ptx
        with pytest.raises(AssertionError):
            operands_lie_where_products_read(moved, tile)


def test_the_weight_loader_knows_which_tiles_have_a_token() -> None:
    """Its loop over tiles carries what it is told of the next one: among it the tokens, by which it ends."""
    for it in gemms(BLOCKS, Launch("tma", SMALLEST), 1, "_rows_gemm_kernel"):
        *_, loader, _scheduler = it["ttgir"].split("num_warps(1) {")
        over_tiles = loader[loader.index("scf.while") :]
        assert "async_tma_copy_global_to_local" in over_tiles
        carried = re.match(r"scf\.while \((.*?)\) :", over_tiles)
        told = ("expert", "first position", "tokens", "row tile")
        assert carried and carried[1].count("=") == len(("stage", "phase", "job", *told))


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("bf16", TWO_WORKERS),
        ("fp8 channel", TWO_WORKERS),
        pytest.param("fp8 channel", TmaTile(96, 2, 2, 3), marks=pytest.mark.slow),
        pytest.param("fp8 channel", TmaTile(192, 2, 2, 3, fast_sums=1), marks=pytest.mark.slow),
        pytest.param("weighted on input", TmaTile(192, 2, 2, 3), marks=pytest.mark.slow),
        pytest.param("fp8 block", TmaTile(128, 2, 2, 4, turned=1), marks=pytest.mark.slow),
        ("int4", TmaTile(96, 2, 1, 5, group_m=4)),
        pytest.param("int4, fp32 scales", TmaTile(96, 2, 1, 4, group_m=4), marks=pytest.mark.slow),
    ],
)
def test_shared_memory_is_what_was_counted(name: str, tile: TmaTile) -> None:
    """The first GEMM's kernel needs less where its epilogue needs nothing of the tokens."""
    routed = replace(QWEN.problem, routing=Routing(weight_on_input=True), top_k=1)
    layer = LAYERS.get(name) or empty_layer(routed, "moectl")
    used = [it.shared for it in inspect(layer, 64, Launch("tma", tile), OFFLINE_GPUS[90]) if it.wgmma]
    counted = shared_bytes(layer.problem, tile)
    assert counted - 128 < max(used) <= counted


@pytest.mark.parametrize("name", ["bf16", "fp8 block", "fp8 channel", "fp8 block, 16-bit tokens", "int4"])
def test_stages_are_released_once_read_and_barriers_have_memory_of_their_own(name: str) -> None:
    for kernel in inspect(LAYERS[name], 64, Launch("tma", TWO_WORKERS), OFFLINE_GPUS[90]):
        assert not kernel.handovers and not kernel.overwritten


CODES = re.compile(r"\[R\d+(\+0x400)?\]")
"""Where codes of INT4 are read: in a row, or in the one that is eight further on."""


@pytest.mark.parametrize(
    ("name", "tile"),
    every_nth(
        [
            (it, tile)
            for it in ("int4", "int4, fp32 scales")
            for tile in TMA_FAMILY.candidates(LAYERS[it].problem)
        ],
        6,
    ),
)
def test_scales_of_groups_have_been_read_when_their_stage_is_given_back(name: str, tile: TmaTile) -> None:
    """A tile of few tokens has loads of the next stage in flight then, which lie in other places."""
    for launched in launched_gemms(LAYERS[name], Launch("tma", tile), 64, "_rows_gemm_kernel"):
        _, code = disassembled(launched.kernel.asm["cubin"])
        loops = [loop for loop in code.loops if loop.count(*WGMMA)]
        inside = [i for loop in loops for i in loop.instructions]
        loads = [i for i in inside if i.family in LOADS and i.guard != NEVER]
        scales = {i.address for i in loads if not CODES.fullmatch(i.operands[1])}
        assert scales and len(scales) < len(loads)
        products = {i.address for i in inside}
        late = [it for it in late_reads(code) if it.arrival.address in products]
        assert all(it.ahead for it in late) if tile.tokens < 64 else not late
        # Those of two rows, once for each width: none has sunk past the wait for the next stage.
        ends = {max(i.address for i in loop.instructions if i.op.startswith(WGMMA)) for loop in loops}
        assert len({it.load.address for it in late} & scales) <= 2 * len(ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        (name, tile)
        for name, layer in LAYERS.items()
        if name not in DECODED
        for tile in TMA_FAMILY.candidates(layer.problem)
    ],
    ids=lambda value: value if isinstance(value, str) else named(value),
)
def test_they_do_in_every_tile(name: str, tile: TmaTile) -> None:
    layer = LAYERS[name]
    for ptx in compiled(layer, tile):
        products_have_all_widths(ptx, layer, tile)
        operands_lie_where_products_read(ptx, tile)
        stores_are_wide(ptx)


@pytest.mark.parametrize(
    ("name", "tile"),
    every_nth([(name, tile) for name in DECODED for tile in TMA_FAMILY.candidates(LAYERS[name].problem)], 4),
)
def test_weights_are_decoded_into_registers(name: str, tile: TmaTile) -> None:
    made = [it for it in inspect(LAYERS[name], 64, Launch("tma", tile), OFFLINE_GPUS[90]) if it.wgmma]
    assert len(made) == 2
    for it in made:
        assert it.wgmma_a == it.wgmma and not it.stack, it


@pytest.mark.parametrize(
    ("weight", "tokens", "blocks_m", "activation", "dtype"),
    [
        (FP8_CHANNEL, 128, 1, Activation("gelu_tanh"), "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (FP8_CHANNEL, 128, 2, Activation("silu"), "fp16"),
                (FP8_TENSOR, 128, 2, Activation("relu2", gated=False), "bf16"),
                (FP8_BLOCK, 96, 2, Activation("gelu_tanh"), "bf16"),
                (FP8_BLOCK, 96, 2, Activation("swiglustep", limit=7.0), "bf16"),
                (FP8_BLOCK, 128, 1, Activation("silu"), "fp16"),
            )
        ),
    ],
    ids=str,
)
def test_wide_tiles_that_decode_spill_nothing_with_other_epilogues(
    weight: WeightFormat, tokens: int, blocks_m: int, activation: Activation, dtype: str
) -> None:
    sizes = BLOCKS if weight is FP8_BLOCK else QWEN
    problem = replace(sizes.problem, scheme=Scheme(weight), activation=activation, dtype=dtype)
    layer = empty_layer(problem, "moectl")
    (tile,) = (
        tile
        for tile in TMA_FAMILY.candidates(layer.problem)
        if (tile.tokens, tile.workers, tile.blocks_m) == (tokens, 2, blocks_m)
    )
    made = [it for it in inspect(layer, 64, Launch("tma", tile), OFFLINE_GPUS[90]) if it.wgmma]
    assert len(made) == 2 and not any(it.stack or it.spills for it in made), made
