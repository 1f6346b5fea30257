"""Host code of the warpwise kernels: int4 for few tokens per expert, in plain Triton.

Every warp streams weight tiles of its own into matrix instructions, without shared memory or barriers.
A call is two GEMMs and a sum; from a few tokens on, a plan before them that gathers each expert's
assignments in records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...problem.moe_problem import MoEProblem
from . import warpwise_kernels as kernels
from .expert_items import BASES, overlapping
from .expert_records import plan_and_order
from .kernel_family import (
    KernelCall,
    KernelFamily,
    KernelLayer,
    KernelMatrix,
    activation_numbers,
    column_refusal,
    scale_name,
)
from .sort_and_combine import INTERPRETED, finish

REGISTERS = 96
"""Of a lane where they suffice: 20 warps an SM. Left alone, ptxas takes 80 and spills."""

WARPS = (1, 2, 4, 8, 16)

SCALES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class WarpwiseTile:
    """One launch configuration.

    Attributes:
        tokens: of a program, a power of two from 8 on.
        planned: 1 to gather the assignments of an expert first; 0 when each runs alone.
        rows1, rows2: 64-row tiles of a program of the first and the second GEMM, powers of two.
        warps1, warps2: its warps, a multiple of its tiles; those of one tile share the reduction.
        fused: 1 for both GEMMs in one launch, which takes a plan, and equally many warps in both.
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
    """Arguments of the kernels that follow from the layer and the tile, not from the call."""

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
        share, group = warps // rows, self.problem.scheme.weight.group
        scales = m.scales.view(SCALES[scale_name(self.problem)])
        limited = self.tile.tokens == 8 and m.zeros is None
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
            "BASE": BASES[self.problem.dtype],
            "ZEROS": m.zeros is not None,
            "GROUP": max(group, 0),
            "BM": self.tile.tokens,
            "V": rows,
            "KW": share,
            "EVEN": m.k == columns and m.k % (64 * share) == 0,
            "INTERP": INTERPRETED,
            "num_warps": warps,
            "num_stages": 1,
            "maxnreg": REGISTERS if limited else None,
            **overlapping(),
        }


OF_ONE_GEMM = ("W", "S", "Z", "B", "N", "K", "LX", "NX", "row_tiles", "V", "KW", "EVEN")
"""Arguments that a kernel of both GEMMs has twice, for the second with ``_2`` behind the name."""


def _run(layer: KernelLayer, call: KernelCall, tile: WarpwiseTile) -> None:
    problem, w13, w2 = layer.problem, layer.w13, layer.w2
    arguments = _WarpwiseArguments(problem, tile)
    first, second = arguments.gemm1(w13), arguments.gemm2(w2)
    records, x = call.ids, call.x
    if tile.planned:
        records, x = plan_and_order(call.ids, problem.local_experts, tile.tokens, call.x, w13.k, call.order)
    h = call.x.new_empty(call.assignments, w2.k)
    parts = call.parts()
    programs, programs2 = (it["row_tiles"] * len(records) for it in (first, second))
    common: dict[str, Any] = {"PLAN": records, "WEIGHTS": call.weights}
    tokens = {"X": x, "KX": x.shape[1], "H": h, "HX": w2.k}
    if tile.fused:
        first["ON_INPUT"] = first.pop("WEIGHTED")
        others = {f"{name}_2": second[name] for name in OF_ONE_GEMM}
        kernels._warpwise_layer_kernel[(programs + programs2,)](
            Y=parts, records=len(records), **tokens, **common, **first, **others
        )
    else:
        common["PLANNED"] = bool(tile.planned)
        kernels._warpwise_gemm1_kernel[(programs,)](**tokens, **common, **first)
        kernels._warpwise_gemm2_kernel[(programs2,)](H=h, KX=w2.k, Y=parts, **common, **second)
    finish(call, parts, problem.local_experts)


def _fits(problem: MoEProblem, tile: WarpwiseTile) -> str:
    if problem.scheme.weight.name != "int4":
        return f"they take int4, the layer has {problem.scheme.weight}"
    if refused := column_refusal(problem):
        return refused
    if tile.tokens < 8 or tile.tokens & (tile.tokens - 1):
        return f"{tile} takes {tile.tokens} tokens, no power of two from 8 on"
    sides = (tile.rows1, tile.warps1), (tile.rows2, tile.warps2)
    if any(warps not in WARPS or not 0 < rows <= warps or warps % rows for rows, warps in sides):
        return f"{tile} does not divide its warps, of which there are 1, 2, 4, 8 or 16, by its rows"
    if tile.fused and (not tile.planned or tile.warps1 != tile.warps2):
        return f"{tile} has no plan, or another number of warps in each GEMM, in one launch"
    return ""


WORTH_A_TRY: tuple[tuple[int, int, int, int, int, int], ...] = (
    (0, 1, 4, 2, 4, 0),
    (1, 1, 2, 1, 2, 1),
    (1, 2, 2, 2, 2, 0),
    (1, 2, 2, 2, 2, 1),
    (1, 2, 4, 4, 4, 0),
    (1, 2, 4, 4, 4, 1),
)
"""(planned, rows1, warps1, rows2, warps2, fused), 8 tokens: what was fastest on an H200, or near it."""


def _candidates(problem: MoEProblem) -> list[WarpwiseTile]:
    return [WarpwiseTile(8, *sides) for sides in WORTH_A_TRY]


WARPWISE_FAMILY = KernelFamily(
    WarpwiseTile, _run, _fits, interpreted=True, candidates=_candidates, tokens_per_expert=(0, 10)
)
