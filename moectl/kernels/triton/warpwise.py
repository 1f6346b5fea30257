"""Host code of the warpwise kernels: int4 for few tokens per expert, in plain Triton.

Every warp streams its own weight tiles into matrix instructions, without shared memory or barriers. A call is
two GEMMs and a sum. From a few tokens on, a plan kernel first collects each expert's assignments in records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...problem.moe_problem import MoEProblem
from . import warpwise_kernels as kernels
from .expert_records import plan_and_order
from .kernel_family import (
    CODE_BASES,
    KernelCall,
    KernelFamily,
    KernelLayer,
    KernelMatrix,
    activation_numbers,
    column_refusal,
    scale_name,
)
from .launch_shape import GemmShape, LaunchShape
from .sort_and_combine import INTERPRETED, finish, launch_options

REGISTERS = 96
"""Registers per thread if they suffice, for 20 warps per SM. By default ptxas takes 80 and spills."""

WARPS = (1, 2, 4, 8, 16)

SCALES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class WarpwiseTile:
    """One launch configuration.

    Attributes:
        tokens: per program, a power of two from 8 on.
        planned: 1 to group assignments by expert first; 0 to compute each on its own.
        rows1, rows2: number of 64-row tiles per program of the first and the second GEMM, powers of two.
        warps1, warps2: warps per program, a multiple of the tiles; the warps of a tile split the reduction.
        fused: 1 for both GEMMs in one launch, which needs a plan and as many warps in both.
    """

    tokens: int
    planned: int
    rows1: int
    warps1: int
    rows2: int
    warps2: int
    fused: int = 0


@dataclass(frozen=True)
class _WarpwiseArguments:
    """Arguments of the GEMM kernels that depend on the layer and the tile only."""

    problem: MoEProblem
    tile: WarpwiseTile

    def gemm1(self, m: KernelMatrix) -> dict[str, Any]:
        p, act = self.problem, self.problem.activation
        return {
            **self._gemm(m, p.dims.hidden, p.dims.intermediate, self.tile.rows1, self.tile.warps1),
            **activation_numbers(act),
            "TOP_K": p.top_k,
            "ACT": act.name,
            "GATED": act.gated,
            "WEIGHTED": p.routing.weight_on_input,
        }

    def gemm2(self, m: KernelMatrix) -> dict[str, Any]:
        p = self.problem
        return {
            **self._gemm(m, p.dims.intermediate, p.dims.hidden, self.tile.rows2, self.tile.warps2),
            "WEIGHTED": not p.routing.weight_on_input,
        }

    def _gemm(self, m: KernelMatrix, columns: int, outputs: int, rows: int, warps: int) -> dict[str, Any]:
        warps_per_tile, group = warps // rows, self.problem.scheme.weight.group
        scales = m.scales.view(SCALES[scale_name(self.problem)])
        limit_registers = self.tile.tokens == 8 and m.zeros is None
        return {
            "W": m.codes.view(torch.int16),
            "S": scales,
            "Z": scales if m.zeros is None else m.zeros.view(torch.int16),
            "B": scales if m.bias is None else m.bias,
            "N": m.n,
            "K": m.k,
            "LX": columns,
            "NX": outputs,
            "row_tiles": math.ceil(m.n / (64 * rows)),
            "E": self.problem.local_experts,
            "BIAS": m.bias is not None,
            "BASE": CODE_BASES[self.problem.dtype],
            "ZEROS": m.zeros is not None,
            "GROUP": max(group, 0),
            "BM": self.tile.tokens,
            "V": rows,
            "KW": warps_per_tile,
            "EVEN": m.k == columns and m.k % (64 * warps_per_tile) == 0,
            "INTERP": INTERPRETED,
            "num_warps": warps,
            "num_stages": 1,
            "maxnreg": REGISTERS if limit_registers else None,
            **launch_options(),
        }


PER_GEMM = ("W", "S", "Z", "B", "N", "K", "LX", "NX", "row_tiles", "V", "KW", "EVEN")
"""Arguments of which the fused kernel has two, the second GEMM's with the suffix ``_2``."""


def _run(layer: KernelLayer, call: KernelCall, tile: WarpwiseTile) -> None:
    problem, w13, w2 = layer.problem, layer.w13, layer.w2
    arguments = _WarpwiseArguments(problem, tile)
    first, second = arguments.gemm1(w13), arguments.gemm2(w2)
    records, x = call.ids, call.x
    if tile.planned:
        records, x = plan_and_order(call.ids, problem.local_experts, tile.tokens, call.x, w13.k, call.order)
    h = call.x.new_empty(call.assignments, w2.k)
    parts = call.parts()
    programs, programs2 = (gemm["row_tiles"] * len(records) for gemm in (first, second))
    common: dict[str, Any] = {"PLAN": records, "WEIGHTS": call.weights}
    tokens = {"X": x, "KX": x.shape[1], "H": h, "HX": w2.k}
    if tile.fused:
        first["ON_INPUT"] = first.pop("WEIGHTED")
        gemm2 = {f"{name}_2": second[name] for name in PER_GEMM}
        kernels._warpwise_layer_kernel[(programs + programs2,)](
            Y=parts, records=len(records), **tokens, **common, **first, **gemm2
        )
    else:
        common["PLANNED"] = bool(tile.planned)
        kernels._warpwise_gemm1_kernel[(programs,)](**tokens, **common, **first)
        kernels._warpwise_gemm2_kernel[(programs2,)](H=h, KX=w2.k, Y=parts, **common, **second)
    finish(call, parts, problem.local_experts)


def _fits(problem: MoEProblem, tile: WarpwiseTile) -> str:
    if problem.scheme.weight.name != "int4":
        return f"it supports int4; the layer has {problem.scheme.weight}"
    if reason := column_refusal(problem):
        return reason
    if tile.tokens < 8 or tile.tokens & (tile.tokens - 1):
        return f"tokens must be a power of two from 8 on, got {tile}"
    gemms = (tile.rows1, tile.warps1), (tile.rows2, tile.warps2)
    if any(warps not in WARPS or not 0 < rows <= warps or warps % rows for rows, warps in gemms):
        return f"warps must be 1, 2, 4, 8 or 16 and a multiple of rows, got {tile}"
    if tile.fused and (not tile.planned or tile.warps1 != tile.warps2):
        return f"a fused launch needs a plan and as many warps in both GEMMs, got {tile}"
    return ""


CANDIDATES: tuple[tuple[int, int, int, int, int, int], ...] = (
    (0, 1, 4, 2, 4, 0),
    (1, 1, 2, 1, 2, 1),
    (1, 2, 2, 2, 2, 0),
    (1, 2, 2, 2, 2, 1),
    (1, 2, 4, 4, 4, 0),
    (1, 2, 4, 4, 4, 1),
)
"""(planned, rows1, warps1, rows2, warps2, fused) with 8 tokens: the fastest on an H200, or close to it."""


def _candidates(problem: MoEProblem) -> list[WarpwiseTile]:
    return [WarpwiseTile(8, *values) for values in CANDIDATES]


def launch_shape(problem: MoEProblem, tile: WarpwiseTile) -> LaunchShape:
    """The tile in the terms of the model of time."""
    first, second = (
        GemmShape(f"warpwise {rows}x{warps}", 64 * rows, warps // rows, copied=tile.tokens)
        for rows, warps in ((tile.rows1, tile.warps1), (tile.rows2, tile.warps2))
    )
    kind = "fused" if tile.fused else "planned" if tile.planned else "each"
    return LaunchShape(f"warpwise {kind}", (first, second), (tile.tokens,) if tile.planned else ())


WARPWISE_FAMILY = KernelFamily(
    WarpwiseTile,
    _run,
    _fits,
    interpreted=True,
    candidates=_candidates,
    tokens_per_expert=(0, 10),
    shape=launch_shape,
)
