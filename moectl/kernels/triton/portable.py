"""Host code of the portable kernels: plain Triton for every GPU from compute capability 8.0 on.

The decode family runs three kernels (first GEMM with activation, split-K second GEMM, sum), and resolves the
routing inside the GEMMs. The grouped family, for more tokens, sorts by expert, and runs two grouped GEMMs and
a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ...problem.moe_problem import MoEProblem
from . import portable_kernels as kernels
from .kernel_family import KernelCall, KernelFamily, KernelLayer, KernelMatrix, activation_numbers, scale_name
from .launches import DECODE, Tile, grouped_for, is_legal, token_tiles
from .sort_and_combine import INTERPRETED, combine, finish, order_of


def _shared_constants(problem: MoEProblem, tile: Tile) -> dict[str, Any]:
    """Compile-time arguments of every GEMM kernel."""
    weight = problem.scheme.weight
    return {
        "E": problem.local_experts,
        "FORMAT": weight.name,
        "GROUP": weight.group,
        "ZERO": weight.zero_point,
        "SCALE": scale_name(problem),
        "BM": tile.tokens,
        "BN": tile.rows,
        "BK": tile.depth,
        "STAGES": tile.stages,
        "INTERP": INTERPRETED,
        "num_warps": tile.warps,
    }


@dataclass(frozen=True)
class _PortableArguments:
    """Arguments of the GEMM kernels that depend on the layer and the tile only."""

    layer: KernelLayer
    tile: Tile

    @property
    def gemm1(self) -> dict[str, Any]:
        """Keyword arguments of the first GEMM, without tokens and routing."""
        p, act = self.layer.problem, self.layer.problem.activation
        return {
            **self._gemm(self.layer.w13, p.dims.hidden, p.dims.intermediate),
            **activation_numbers(act),
            "TOP_K": p.top_k,
            "ACT": act.name,
            "GATED": act.gated,
            "WEIGHTED": p.routing.weight_on_input,
        }

    @property
    def gemm2(self) -> dict[str, Any]:
        """Keyword arguments of the second GEMM, without tokens and routing."""
        p = self.layer.problem
        return {
            **self._gemm(self.layer.w2, p.dims.intermediate, p.dims.hidden),
            "WEIGHTED": not p.routing.weight_on_input,
        }

    def _gemm(self, m: KernelMatrix, columns: int, outputs: int) -> dict[str, Any]:
        return {
            "W": m.codes.view(torch.int32),
            "S": m.scales,
            "Z": m.scales if m.zeros is None else m.zeros,
            "B": m.codes if m.bias is None else m.bias,
            "N": m.n,
            "K": m.k,
            "KX": columns,
            "NX": outputs,
            "BIAS": m.bias is not None,
            "EVEN_N": m.n % self.tile.rows == 0,
            "EVEN_K": m.k == columns and columns % self.tile.depth == 0,
            **_shared_constants(self.layer.problem, self.tile),
        }

    def row_tiles(self, m: KernelMatrix) -> int:
        """Number of programs along the rows of `m`."""
        return math.ceil(m.n / self.tile.rows)


READ_AT_ONCE = (16, 64, 256)
"""Sizes to which the number of ids that a decode program reads is rounded up: each is another kernel to
compile."""


def _decode(layer: KernelLayer, call: KernelCall, tile: Tile) -> None:
    problem, t = layer.problem, call.assignments
    arguments = _PortableArguments(layer, tile)
    programs = min(t, problem.local_experts)
    blocks = triton.cdiv(len(call.x), tile.tokens)
    h = call.x.new_empty(t, problem.dims.intermediate)
    parts = call.x.new_empty(tile.split, t, problem.dims.hidden, dtype=torch.float32)
    routing = {
        "BY_SLOT": t <= problem.local_experts,
        "TPAD": next((size for size in READ_AT_ONCE if t <= size), triton.next_power_of_2(t)),
        "M_BLOCKS": blocks,
    }
    kernels._decode_gemm1_kernel[(arguments.row_tiles(layer.w13), programs * blocks)](
        X=call.x, H=h, IDS=call.ids, WEIGHTS=call.weights, T=t, **routing, **arguments.gemm1
    )
    kernels._decode_gemm2_kernel[(arguments.row_tiles(layer.w2), programs * blocks, tile.split)](
        H=h,
        Y=parts,
        IDS=call.ids,
        WEIGHTS=call.weights,
        T=t,
        SPLIT_K=tile.split,
        **routing,
        **arguments.gemm2,
    )
    combine(parts, call.ids, call.y, problem.local_experts)


def _grouped(layer: KernelLayer, call: KernelCall, tile: Tile) -> None:
    problem, t = layer.problem, call.assignments
    arguments = _PortableArguments(layer, tile)
    experts = problem.local_experts
    sorted_slots, offsets = order_of(call, experts)
    h = call.x.new_empty(t, problem.dims.intermediate)
    y = call.parts()
    tiles = token_tiles(t, experts, tile.tokens)
    routing = {
        "SORTED": sorted_slots,
        "OFFSETS": offsets,
        "WEIGHTS": call.weights,
        "EPAD": triton.next_power_of_2(experts),
        "TAILS": tile.tails,
    }
    n1, n2 = arguments.row_tiles(layer.w13), arguments.row_tiles(layer.w2)
    kernels._grouped_gemm1_kernel[(tiles * n1,)](X=call.x, H=h, row_tiles=n1, **routing, **arguments.gemm1)
    kernels._grouped_gemm2_kernel[(tiles * n2,)](H=h, Y=y, row_tiles=n2, **routing, **arguments.gemm2)
    finish(call, y, experts)


def _fits(problem: MoEProblem, tile: Tile) -> str:
    group = problem.scheme.weight.group
    return (
        ""
        if is_legal(tile, group)
        else f"{tile} does not consist of whole weight tiles and groups of {group}"
    )


def _decode_tiles(problem: MoEProblem) -> list[Tile]:
    return [tile for _, tile in DECODE]


def _grouped_tiles(problem: MoEProblem) -> list[Tile]:
    return [tile for _, tile in grouped_for(problem)]


DECODE_FAMILY = KernelFamily(
    Tile, _decode, _fits, interpreted=True, candidates=_decode_tiles, tokens_per_expert=(0, 16)
)
GROUPED_FAMILY = KernelFamily(Tile, _grouped, _fits, interpreted=True, candidates=_grouped_tiles)
