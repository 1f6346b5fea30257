"""Host code of the warpwise kernels: int4 for few tokens per expert, in plain Triton.

Every warp streams its own weight tiles into matrix instructions, without shared memory or barriers. A call is
two GEMMs and a sum. From a few tokens on, a plan kernel first collects each expert's assignments in records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...later import Later
from ...problem.moe_problem import MoEProblem
from ...torch_dtypes import MODEL_TORCH_DTYPES
from ..choice.tile_family import scale_name
from ..choice.warpwise_launches import WARPWISE_TILES, WarpwiseTile
from .kernel_family import CODE_BASES, KernelCall, KernelFamily, KernelLayer, KernelMatrix, activation_numbers
from .sort_and_combine import INTERPRETED, finish, launch_options, records_and_reordered

kernels = Later(f"{__package__}.warpwise_kernels")

REGISTERS = 96
"""Registers per thread if they suffice, for 20 warps per SM. By default ptxas takes 80 and spills."""


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
        scales = m.scales.view(MODEL_TORCH_DTYPES[scale_name(self.problem)])
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
        records, x = records_and_reordered(
            call.ids, problem.local_experts, tile.tokens, call.x, w13.k, call.order
        )
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


WARPWISE_FAMILY = KernelFamily.of(WARPWISE_TILES, _run, interpreted=True)
