"""The moectl_marlin kernels, compiled without a GPU: weights go from memory into mma operands directly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from devtools.inspection.kernel_report import KernelReport, report_of
from devtools.inspection.offline_gpu import OFFLINE_GPUS, LaunchedKernel, compiling_for

from moectl.convert.layouts.registry import layout_named
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.marlin import LAYOUT, MarlinTile, run_with, tile_for
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import Scheme, int_format
from moectl.torch_dtypes import TORCH_DTYPES
from support.marlin_cases import FORMATS, TILES
from support.random_layers import DTYPES
from support.sampling import every_nth

KIMI_K2 = MoEProblem(Dims(7168, 2048), 384, 8, Scheme(int_format(4, 32)))
QWEN3 = MoEProblem(Dims(2048, 768), 128, 8, Scheme(int_format(4, 128)))
AWQ = replace(QWEN3, scheme=Scheme(int_format(4, 128, zero_point=True)))

LAYERS = {"kimi-k2": (KIMI_K2, 280), "qwen3": (QWEN3, 230), "awq": (AWQ, 330)}
"""Layers, and how many instructions a warp may spend on a 64x64 tile of weights. More mean that values
move between threads, or wait in shared memory, on their way into the products."""

CASES = [("kimi-k2", 90), ("awq", 90), ("kimi-k2", 80)]
CASES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (("qwen3", 90), *(("kimi-k2", arch) for arch in OFFLINE_GPUS if arch not in (80, 90)))
]


TURNS = [(name, list(TILES)[turn % len(TILES)]) for turn, name in enumerate(FORMATS)]
"""Every format that is run on a GPU, tiles in turn."""


def without_weights(problem: MoEProblem) -> PreparedMoE:
    layout = layout_named(LAYOUT)
    stored = layout.recipe(layout.pad(problem)).stored
    weights = {
        role: torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device="meta")
        for role, (dtype, shape) in stored.items()
    }

    def dense(ids: object) -> None:
        raise AssertionError("nothing is decoded when compiling")

    return PreparedMoE(problem, "moectl_marlin", LAYOUT, weights, dense)  # type: ignore[arg-type]


def launched_by(problem: MoEProblem, tokens: int, tile: MarlinTile, arch: int) -> list[LaunchedKernel]:
    """The two products of a call."""
    dtype = DTYPES[problem.dtype]
    x = torch.empty(tokens, problem.dims.hidden, dtype=dtype, device="meta")
    ids = torch.empty(tokens, problem.top_k, dtype=torch.int32, device="meta")
    with compiling_for(OFFLINE_GPUS[arch]) as launched:
        run_with(without_weights(problem), x, ids, ids.float(), tile)
    products = [it for it in launched if "gemm" in it.name]
    assert len(products) == 2
    return products


def compiled(problem: MoEProblem, tokens: int, tile: MarlinTile, arch: int) -> list[KernelReport]:
    return [report_of(it) for it in launched_by(problem, tokens, tile, arch)]


def ttir_of(name: str) -> str:
    """The first form of a kernel, of an SM90's few tokens."""
    products = launched_by(KIMI_K2, 4, tile_for(KIMI_K2, 4), 90)
    return next(it.kernel.asm["ttir"] for it in products if it.name == name)


@pytest.mark.parametrize(("name", "tile"), every_nth(TURNS, 5))
def test_every_format_compiles_without_faults(name: str, tile: str) -> None:
    for report in compiled(FORMATS[name], 5, TILES[tile], 90):
        print(report)
        assert not report.faults and report.mma and not report.wgmma


def test_what_is_read_before_the_wait_for_another_kernel_comes_from_l2() -> None:
    """The second product reads its work while the first still runs: L1 may hold an earlier call's."""
    before, after = ttir_of("_marlin_gemm2_kernel").split("griddepcontrol.wait", 1)
    early = [line for line in before.splitlines() if "tt.load" in line]
    print(*early, sep="\n")
    assert len(early) == 4 and all("cacheModifier = cg" in line for line in early)
    assert "tt.load" in after


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_weights_meet_no_shared_memory(name: str, arch: int) -> None:
    (problem, most), tokens = LAYERS[name], 4
    for report in compiled(problem, tokens, tile_for(problem, tokens), arch):
        print(report)
        assert not report.faults and report.mma and not report.wgmma
        (loop,) = report.loops
        # A tile is 16 products of 8 tokens, and 4 that take the surplus off however many tiles there are.
        assert loop.instructions <= most * round(loop.products / 20)
