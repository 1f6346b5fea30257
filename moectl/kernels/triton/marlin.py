"""The moectl_marlin backend: reads Marlin's int4 layout in place, without repacking.

It is meant for decode, where few tokens share a read of the weights: a directory converted for Marlin runs
directly, from the same bytes that vLLM's kernels read. The kernels support any number of tokens, but with
many tokens per expert the triton backend is faster. A call sorts the assignments by expert, lists blocks of
them, and runs two GEMMs and a sum; grids depend on sizes only and sums have a fixed order.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...capabilities.own_kernels import TRITON_MARLIN
from ...errors import UsageError
from ...problem.moe_problem import MoEProblem
from ..choice.launch import Launch, tile_words, token_tiles
from ..choice.tile_family import scale_name
from ..prepared_layer import PreparedMoE
from ..runner import ActivationFormat, Runner
from . import marlin_kernels as kernels
from .expert_batches import compute_batch, one_each
from .kernel_family import CODE_BASES, ExpertOrder, KernelCall, activation_numbers
from .sort_and_combine import INTERPRETED, finish, launch_options, sort_by_expert
from .triton_runner import aligned, gpu_refusal
from .workspace import products_and_lists

LAYOUT = TRITON_MARLIN.weights[0].layout


@dataclass(frozen=True, slots=True)
class MarlinTile:
    """One launch configuration.

    Attributes:
        tokens: per program, a multiple of 8.
        depth: number of 16-column tiles that a warp reads at a time.
        warps1, warps2: warps per program of the first and the second GEMM.
        rows2: number of 64-row tiles per program of the second GEMM, a power of two.
    """

    tokens: int
    depth: int
    warps1: int
    warps2: int
    rows2: int


TILES: tuple[tuple[int, float, MarlinTile], ...] = (
    (16, math.inf, MarlinTile(tokens=8, depth=4, warps1=8, warps2=4, rows2=2)),
    (1 << 31, 8, MarlinTile(tokens=8, depth=4, warps1=4, warps2=4, rows2=4)),
    (1 << 31, math.inf, MarlinTile(tokens=16, depth=4, warps1=4, warps2=4, rows2=4)),
)
"""(maximum assignments, maximum tokens per expert, tile); the first match is used. Small grids get more warps
per program. Measured on an H200."""


def tile_for(problem: MoEProblem, tokens: int) -> MarlinTile:
    """The tile for `tokens` tokens; depends on sizes only, never on the routing."""
    t = tokens * problem.top_k
    per_expert = t / problem.experts
    return next(tile for max_t, limit, tile in TILES if t <= max_t and per_expert <= limit)


@dataclass(frozen=True)
class MarlinMatrix:
    """One of the two expert matrices.

    Attributes:
        codes: ``[experts, k / 16, n * 4]`` int16.
        scales: ``[experts, groups, n]``.
        zeros: ``[experts, groups, n / 8]`` int32, or None.
        bias: ``[experts, n]``, or None.
        n, k: stored (padded) rows and columns.
        group: columns per scale; 0 for one scale per row.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    group: int


def matrix_of(prepared: PreparedMoE, role: str) -> MarlinMatrix:
    """The matrix `role` of a layer; UsageError if the shapes of its tensors do not match."""
    weights = prepared.weights
    codes, scales = weights[role], weights[f"{role}_scale"]
    if codes.ndim != 3 or codes.dtype != torch.int32 or codes.shape[2] % 128:
        raise UsageError(
            f"{role} must be int32 [experts, k / 16, 2 * n] of whole 64-row tiles, "
            f"got {codes.dtype} {list(codes.shape)}"
        )
    n, k = codes.shape[2] // 2, 16 * codes.shape[1]
    groups = scales.shape[1]
    if scales.shape[2] != n or k % groups:
        raise UsageError(f"{role}_scale must be [experts, groups, {n}], got {list(scales.shape)}")
    zeros, bias = weights.get(f"{role}_zero"), weights.get(f"{role}_bias")
    if prepared.problem.scheme.weight.zero_point and (zeros is None or zeros.shape[1:] != (groups, n // 8)):
        got = None if zeros is None else list(zeros.shape)
        raise UsageError(f"{role}_zero must be [experts, {groups}, {n // 8}], got {got}")
    return MarlinMatrix(codes.view(torch.int16), scales, zeros, bias, n, k, k // groups if groups > 1 else 0)


def _matrices(prepared: PreparedMoE) -> tuple[MarlinMatrix, MarlinMatrix]:
    """The layer's two matrices, created once."""
    return prepared.derive(
        "moectl_marlin", lambda prepared: (matrix_of(prepared, "w13"), matrix_of(prepared, "w2"))
    )


def list_items(ids: Tensor, experts: int, block: int, order: ExpertOrder | None = None) -> dict[str, Any]:
    """The kernels' routing arguments; an item is up to `block` tokens of one expert.

    Two to four small launches sort the assignments by expert, unless their `order` is given, and list the
    items. ``bound``, an upper bound on the number of items, depends on sizes only.
    """
    slots, offsets = order or sort_by_expert(ids, experts)
    bound = token_tiles(ids.numel(), experts, block)
    items = ids.new_empty(3, bound)
    pad = triton.next_power_of_2(experts)
    kernels._items_kernel[(1,)](offsets, items, bound, E=experts, EPAD=pad, BM=block, **launch_options())
    return {"SORTED": slots, "ITEMS": items, "bound": bound}


@dataclass(frozen=True)
class _MarlinArguments:
    """Arguments of the GEMM kernels that depend on the layer and the tile only."""

    problem: MoEProblem
    tile: MarlinTile

    @property
    def rows(self) -> str:
        """Order of gate and up rows in the first matrix; ``single`` for experts without a gate."""
        return self.problem.rows if self.problem.activation.gated else "single"

    def gemm1(self, m: MarlinMatrix) -> dict[str, Any]:
        p, act, tile = self.problem, self.problem.activation, self.tile
        warps_per_tile = tile.warps1 // 2
        return {
            **self._gemm(m, p.dims.hidden, p.dims.intermediate, warps_per_tile),
            "row_tiles": math.ceil(m.n / 128),
            **activation_numbers(act),
            "TOP_K": p.top_k,
            "ACT": act.name,
            "ROWS": self.rows,
            "WEIGHTED": p.routing.weight_on_input,
            "KW": warps_per_tile,
            "num_warps": tile.warps1,
        }

    def gemm2(self, m: MarlinMatrix) -> dict[str, Any]:
        p, tile = self.problem, self.tile
        warps_per_tile = tile.warps2 // tile.rows2
        return {
            **self._gemm(m, p.dims.intermediate, p.dims.hidden, warps_per_tile),
            "row_tiles": math.ceil(m.n / (64 * tile.rows2)),
            "WEIGHTED": not p.routing.weight_on_input,
            "V": tile.rows2,
            "KW": warps_per_tile,
            "num_warps": tile.warps2,
        }

    def _gemm(self, m: MarlinMatrix, columns: int, outputs: int, warps_per_tile: int) -> dict[str, Any]:
        return {
            "W": m.codes,
            "S": m.scales,
            "Z": m.codes if m.zeros is None else m.zeros,
            "B": m.scales if m.bias is None else m.bias,
            "N": m.n,
            "K": m.k,
            "KX": columns,
            "NX": outputs,
            "E": self.problem.local_experts,
            "BIAS": m.bias is not None,
            "BASE": CODE_BASES[self.problem.dtype],
            "ZEROS": m.zeros is not None,
            "GROUP": m.group,
            "BM": self.tile.tokens,
            "DEPTH": self.tile.depth,
            **launch_options(),
            "EVEN": m.k == columns and m.k % (16 * self.tile.depth * warps_per_tile) == 0,
            "INTERP": INTERPRETED,
            "num_stages": 1,
        }


def run_with(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, tile: MarlinTile) -> Tensor:
    """`Runner.compute` with a given tile, for tuning and tests."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    call = KernelCall(aligned(x), aligned(ids).view(-1), aligned(weights).view(-1), y)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _run(prepared.problem, _matrices(prepared), call, tile)
    return y


def _run(
    problem: MoEProblem, matrices: tuple[MarlinMatrix, MarlinMatrix], call: KernelCall, tile: MarlinTile
) -> None:
    """Fills ``call.y``."""
    arguments, experts = _MarlinArguments(problem, tile), problem.local_experts
    routing = list_items(call.ids, experts, tile.tokens, call.order)
    bound = routing["bound"]
    first, second = arguments.gemm1(matrices[0]), arguments.gemm2(matrices[1])
    h, parts = call.x.new_empty(call.assignments, problem.dims.intermediate), call.parts()
    kernels._marlin_gemm1_kernel[(first["row_tiles"] * bound,)](
        X=call.x, H=h, WEIGHTS=call.weights, **routing, **first
    )
    kernels._marlin_gemm2_kernel[(second["row_tiles"] * bound,)](
        H=h, Y=parts, WEIGHTS=call.weights, **routing, **second
    )
    finish(call, parts, experts)


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return run_with(prepared, x, ids, weights, tile_for(prepared.problem, len(x)))


def run_batch_with(prepared: PreparedMoE, x: Tensor, counts: Tensor, tile: MarlinTile) -> Tensor:
    """`Runner.batched` with a given tile."""
    problem, matrices = one_each(prepared.problem), _matrices(prepared)
    return compute_batch(aligned(x), counts, lambda call: _run(problem, matrices, call, tile))


def _batched(prepared: PreparedMoE, x: Tensor, counts: Tensor, expected: int | None = None) -> Tensor:
    rows = x.shape[0] * x.shape[1]  # programs are as many, however few are tokens
    return run_batch_with(prepared, x, counts, tile_for(one_each(prepared.problem), rows))


def _refusal(problem: MoEProblem, device: torch.device) -> str:
    weight = problem.scheme.weight
    if reason := gpu_refusal(TRITON_MARLIN, device):
        return reason
    if not TRITON_MARLIN.reads(weight):
        names, groups = ", ".join(TRITON_MARLIN.names), TRITON_MARLIN.groups
        return f"it supports {names} with scale groups of {groups} and of whole rows; the layer has {weight}"
    if not scale_name(problem):
        return f"it supports 16-bit scales; the layer has {weight.scale_dtype}"
    if reason := TRITON_MARLIN.activation_refusal(problem.activation):
        return reason
    if problem.dtype not in CODE_BASES:
        return f"it supports {' and '.join(CODE_BASES)} models; this one is {problem.dtype}"
    return ""


def _tactic(prepared: PreparedMoE, tokens: int) -> str:
    return tile_words(tile_for(prepared.problem, tokens)) if tokens else ""


def _workspace(prepared: PreparedMoE, tokens: int, form: ActivationFormat) -> int:
    problem = prepared.problem
    batched = form is ActivationFormat.BATCHED
    tile = (
        tile_for(one_each(problem), tokens * problem.local_experts) if batched else tile_for(problem, tokens)
    )
    return products_and_lists(problem, tokens, form, Launch("marlin", tile), problem.dims.intermediate)


RUNNER = Runner(
    "moectl_marlin",
    LAYOUT,
    _compute,
    _refusal,
    batched=_batched,
    tactic=_tactic,
    workspace=_workspace,
)
