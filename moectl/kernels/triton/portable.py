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
from torch import Tensor

from ...capabilities.own_kernels import in_rows, token_format
from ...later import Later
from ...problem.moe_problem import MoEProblem
from ..choice.launch import token_tiles
from ..choice.portable_launches import DECODE_ASSIGNMENTS, DECODE_TILES, GROUPED_TILES, Tile
from ..choice.tile_family import scale_name, weight_scales
from .kernel_family import AnyLayer, KernelCall, KernelFamily, KernelMatrix, activation_numbers
from .row_matrix import RowMatrix
from .sort_and_combine import INTERPRETED, combine, finish, order_of
from .token_codes import ALL_ROWS, LiveRows, TokenCodes, code_dtype, quantize_rows, scale_kind

kernels = Later(f"{__package__}.portable_kernels")


def _shared_constants(problem: MoEProblem, tile: Tile) -> dict[str, Any]:
    """Compile-time arguments of every GEMM kernel."""
    weight, act = problem.scheme.weight, token_format(problem)
    return {
        "E": problem.local_experts,
        "FORMAT": _format(problem),
        "GROUP": weight.group,
        "ZERO": weight.zero_point,
        "SCALE": weight_scales(problem) if in_rows(problem) else scale_name(problem),
        "TOKENS": scale_kind(act) if in_rows(problem) and act else "a16",
        "BM": tile.tokens,
        "BN": tile.rows,
        "BK": tile.depth,
        "STAGES": tile.stages,
        "INTERP": INTERPRETED,
        "num_warps": tile.warps,
    }


def _format(problem: MoEProblem) -> str:
    """The kernels' name of the weights: ``plain`` for 16 bits, ``s8`` and ``s4`` for integers in rows."""
    name = problem.scheme.weight.name
    return {"bf16": "plain", "int8": "s8", "int4": "s4"}.get(name, name) if in_rows(problem) else name


@dataclass(frozen=True)
class _PortableArguments:
    """Arguments of the GEMM kernels that depend on the layer and the tile only."""

    layer: AnyLayer
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

    def _gemm(self, m: KernelMatrix | RowMatrix, columns: int, outputs: int) -> dict[str, Any]:
        return {
            **(_in_rows(m) if isinstance(m, RowMatrix) else _in_tiles(m)),
            "N": m.n,
            "K": m.k,
            "KX": columns,
            "NX": outputs,
            "BIAS": m.bias is not None,
            "HALVES": m.halves if isinstance(m, KernelMatrix) else 0,
            "EVEN_N": m.n % self.tile.rows == 0,
            "EVEN_K": m.k == columns and columns % self.tile.depth == 0,
            **_shared_constants(self.layer.problem, self.tile),
        }

    def row_tiles(self, m: KernelMatrix | RowMatrix) -> int:
        """Number of programs along the rows of `m`."""
        return math.ceil(m.n / self.tile.rows)

    def tokens(self, name: str, x: Tensor, m: KernelMatrix | RowMatrix, live: LiveRows) -> dict[str, Any]:
        """The argument `name`, what enters the GEMM of `m`, and the scales: `x` quantized if it is to be."""
        act = token_format(self.layer.problem)
        if not isinstance(m, RowMatrix) or act is None:
            return {name: x, "XS": x}
        made: TokenCodes = quantize_rows(x, act, m.token_scale, live)
        return {name: made.codes, "XS": made.scales}


def _in_tiles(m: KernelMatrix) -> dict[str, Tensor]:
    return {
        "W": m.codes.view(torch.int32),
        "S": m.scales,
        "Z": m.scales if m.zeros is None else m.zeros,
        "B": m.codes if m.bias is None else m.bias,
        "F": m.scales if m.factors is None else m.factors,
    }


def _in_rows(m: RowMatrix) -> dict[str, Tensor]:
    fp8 = m.weights.dtype == torch.float8_e4m3fn
    weights = m.weights.view(code_dtype()) if fp8 else m.weights
    return {
        "W": weights,
        "S": weights if m.scales is None else m.scales,
        "Z": weights,
        "B": weights if m.bias is None else m.bias,
        "F": weights,
    }


def _decode(layer: AnyLayer, call: KernelCall, tile: Tile) -> None:
    problem, t = layer.problem, call.assignments
    arguments = _PortableArguments(layer, tile)
    programs = min(t, problem.local_experts)
    blocks = triton.cdiv(len(call.x), tile.tokens)
    h = call.x.new_empty(t, problem.dims.intermediate)
    parts = call.x.new_empty(tile.split, t, problem.dims.hidden, dtype=torch.float32)
    routing = {
        "BY_SLOT": int(t <= problem.local_experts),
        "TPAD": triton.next_power_of_2(max(t, DECODE_ASSIGNMENTS)),
        "M_BLOCKS": blocks,
    }
    kernels._decode_gemm1_kernel[(arguments.row_tiles(layer.w13), programs * blocks)](
        H=h,
        IDS=call.ids,
        WEIGHTS=call.weights,
        T=t,
        **arguments.tokens("X", call.x, layer.w13, ALL_ROWS),
        **routing,
        **arguments.gemm1,
    )
    kernels._decode_gemm2_kernel[(arguments.row_tiles(layer.w2), programs * blocks, tile.split)](
        **arguments.tokens("H", h, layer.w2, LiveRows("slots", call.ids, problem.local_experts)),
        Y=parts,
        IDS=call.ids,
        WEIGHTS=call.weights,
        T=t,
        SPLIT_K=tile.split,
        **routing,
        **arguments.gemm2,
    )
    combine(parts, call.ids, call.y, problem.local_experts)


def _grouped(layer: AnyLayer, call: KernelCall, tile: Tile) -> None:
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
    x = arguments.tokens("X", call.x, layer.w13, ALL_ROWS)
    kernels._grouped_gemm1_kernel[(tiles * n1,)](**x, H=h, row_tiles=n1, **routing, **arguments.gemm1)
    entering = arguments.tokens("H", h, layer.w2, LiveRows("sorted", offsets, experts))
    kernels._grouped_gemm2_kernel[(tiles * n2,)](**entering, Y=y, row_tiles=n2, **routing, **arguments.gemm2)
    finish(call, y, experts)


DECODE_FAMILY = KernelFamily.of(DECODE_TILES, _decode, interpreted=True)
GROUPED_FAMILY = KernelFamily.of(GROUPED_TILES, _grouped, interpreted=True)
