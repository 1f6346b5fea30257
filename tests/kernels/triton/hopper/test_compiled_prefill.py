"""The prefill kernels, compiled without a GPU: products read tokens where Triton's copies put them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from devtools.inspection.handovers import ARRIVAL, BARRIER, early_handovers
from devtools.inspection.kernel_report import disassembled
from devtools.inspection.offline_gpu import OFFLINE_GPUS
from devtools.inspection.published_kernels import Inspected, layer_without_weights
from devtools.inspection.shipped_kernels import inspect

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.prefill_launches import PROMISING, SHAPES, PrefillTile
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.hopper.prefill import PREFILL_FAMILY
from moectl.layer.experts import empty_layer
from moectl.problem.schemes import Scheme, int_format
from support.ptx_places import COPIES, READ, Place, Ptx, gemms

from ..test_compiled import VARIANTS, check

GPT_OSS, KIMI = "openai/gpt-oss-20b", "moonshotai/Kimi-K2-Thinking"
QWEN = layer_without_weights("Qwen/Qwen3-30B-A3B-GPTQ-Int4").problem
ZEROS = Scheme(int_format(4, 128, zero_point=True))
TOKENS = 4096


def compiled(layer: PreparedMoE, tile: PrefillTile) -> list[dict[str, Any]]:
    """The code of both GEMMs of a call, by kind."""
    return gemms(layer, Launch("prefill", tile), TOKENS, "_prefill_kernel")


@pytest.fixture(scope="module")
def gpt_oss() -> list[dict[str, Any]]:
    return compiled(layer_without_weights(GPT_OSS), PrefillTile(8))


def tokens_lie_where_products_read(text: str) -> None:
    """Both begin with shared memory, and go on from stage to stage alike."""
    ptx = Ptx(text)
    products = {ptx.place(register) for register in READ.findall(text)}
    stage = 128 * 128
    assert products == {Place(0, frozenset({stage}))}
    copies = [ptx.place(register) for register in COPIES.findall(text)]
    tokens = {place.origin for place in copies if stage in place.strides}
    assert tokens == {16 * 128 * unit for unit in range(8)}


def test_products_read_tokens_where_they_were_copied(gpt_oss: list[dict[str, Any]]) -> None:
    for gemm in gpt_oss:
        tokens_lie_where_products_read(gemm["ptx"])
        moved = re.sub(r"mov\.b32 \t(%r\d+), global_smem;", r"add.s32 \t\1, global_smem, 1024;", gemm["ptx"])
        assert moved != gemm["ptx"]
        with pytest.raises(AssertionError):
            tokens_lie_where_products_read(moved)


LAYERS = {
    "mxfp4": layer_without_weights(GPT_OSS),
    "int4 group 32": layer_without_weights(KIMI),
    "int4 fp16": empty_layer(replace(QWEN, scheme=Scheme(int_format(4, 128, "F16")), dtype="fp16"), "moectl"),
    "int4 with zero points": empty_layer(replace(QWEN, scheme=ZEROS), "moectl"),
}


TILES = [tile for tile in PROMISING if SHAPES[tile.tokens_x16].blocks == 2]


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.tokens_x16} units")
@pytest.mark.parametrize("name", LAYERS)
def test_they_do_in_every_tile(name: str, tile: PrefillTile) -> None:
    for gemm in compiled(LAYERS[name], tile):
        tokens_lie_where_products_read(gemm["ptx"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_and_activation_in_tiles_of_two_blocks(variant: str) -> None:
    """`test_compiled` has them in the last tile, of one block."""
    layer, launch = empty_layer(VARIANTS[variant], "moectl"), Launch("prefill", PrefillTile(9))
    if refused := PREFILL_FAMILY.fits(layer.problem, launch.tile):
        pytest.skip(refused)
    check(Inspected(variant, 90, launch, TOKENS, inspect(layer, TOKENS, launch, OFFLINE_GPUS[90])))


@pytest.mark.slow
def test_the_newest_triton_puts_them_there_too() -> None:
    """Of the environment of `test_compiled`, which pip makes."""
    folder = Path(sys.prefix) / "triton-newest"
    if not folder.is_dir():
        pytest.skip("scripts/inspect_kernels --triton newest installs it")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    tests = f"{__file__}::{test_products_read_tokens_where_they_were_copied.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_ring_is_handed_back_early_and_without_barriers_all_are(gpt_oss: list[dict[str, Any]]) -> None:
    """What racecheck reports of its loads is ordered: between each and its partition's arrival all wait."""
    for gemm in gpt_oss:
        _, code = disassembled(gemm["cubin"])
        arrivals = [i for i in code.instructions if i.op.startswith(ARRIVAL)]
        assert len(arrivals) > 8 and not early_handovers(code)
        without = tuple(replace(i, op="NOP") if i.op.startswith(BARRIER) else i for i in code.instructions)
        early = early_handovers(replace(code, instructions=without))
        assert {it.arrival for it in early} == set(map(str, arrivals))
