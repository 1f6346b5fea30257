"""Prefill kernels for SM90, from about 64 tokens an expert on: host code of `prefill_kernels`.

Sort by expert, cut into token tiles, first GEMM with activation, second GEMM, sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from ....problem import MoEProblem
from ..launch import token_tiles
from ..layer import Call, Layer, Matrix, Regime, activation_numbers, multiprocessors, scale_name
from ..routing import combine, sort_by_expert
from . import prefill_kernels as kernels
from .epilogue import GATED, UNGATED
from .fragments import FOLDED_SCALES, scale_words

ROWS = 256
"""Weight rows of a tile: two warpgroups, two blocks of 64 each."""

UNIT = 16
"""Tokens by which the widths of token tiles differ."""

WIDTHS: dict[int, tuple[int, ...]] = {8: (2, 4, 6, 8), 9: (2, 4, 6, 8, 9)}
"""Most units of a tile -> the widths that its kernel has; a tile takes the next one that holds it.

Each is one power of two or the sum of two.
"""

REGISTERS: dict[int, tuple[int, int]] = {8: (216, 72), 9: (216, 72)}
"""Most units -> registers of a thread that computes and of one that loads, of 504 for two and one."""

SHARED_MEMORY = 227 * 1024
STORED = 2 * 64 * 64 * 2
"""Bytes in which the two warpgroups turn their results around before they store them."""

MOST_STAGES, FEWEST_STAGES = 7, 3

MOST_UNITS_INT8 = 8
"""Units of a tile of int8 weights, whose codes take more registers: with 9 some are spilled."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """One launch configuration.

    Attributes:
        units: most tokens of a tile, in units of 16; a key of `WIDTHS`.
        leap: token tiles that run through all weight rows together, and so share them in the L2 cache.
        trail: steps by which the second warpgroup follows the first.
    """

    units: int = 9
    leap: int = 4
    trail: int = 3


def stages(problem: MoEProblem, tile: PrefillTile) -> int:
    """Stages of the ring that fit into shared memory."""
    weight = problem.scheme.weight
    words = scale_words.fn(weight.name, weight.group) * (2 if weight.zero_point else 1)
    tokens = 128 if tile.units <= 8 else 160
    each = tokens * 128 + 4 * (512 * weight.bits + 4 * words) + 24
    return int(min(MOST_STAGES, (SHARED_MEMORY - STORED - 512) // each))


def _gemm(layer: Layer, m: Matrix, columns: int, outputs: int, tile: PrefillTile) -> dict[str, Any]:
    problem = layer.problem
    weight, ring = problem.scheme.weight, stages(problem, tile)
    computing, loading = REGISTERS[tile.units]
    spans = m.scales.shape[2]
    return {
        "W": m.codes,
        "S": m.scales,
        "Z": m.scales if m.zeros is None else m.zeros,
        "B": m.scales if m.bias is None else m.bias,
        "N": m.n,
        "K": m.k,
        "KX": columns,
        "NX": outputs,
        "spans": spans,
        "WIDTHS": sum(1 << units for units in WIDTHS[tile.units]),
        "FORMAT": weight.name,
        "GROUP": 32 if weight.group == 32 else 64,
        "SPAN": m.k // 64 // spans,
        "ZEROS": m.zeros is not None,
        "EXACT": weight.name == "mxfp4" and not m.exponents_within(FOLDED_SCALES),
        "BIAS": m.bias is not None,
        "EVEN_K": m.k == columns,
        "STAGES": ring,
        "LEAP": tile.leap,
        "TRAIL": min(tile.trail, ring - 1, m.k // 64),
        "CONSUMER_REGISTERS": computing,
        "PRODUCER_REGISTERS": loading,
        "num_warps": 4,
    }


@dataclass(frozen=True)
class Schedule:
    """A call's assignments by expert, cut into token tiles.

    Attributes:
        slots: sorted by expert.
        tiles: ``[bound, 4]``: expert, first and end position, width in units.
        count: ``[3]``: number of tiles, and for each GEMM how many were taken beyond one a program.
        bound: most tiles that there can be.
    """

    slots: Tensor
    tiles: Tensor
    count: Tensor
    bound: int


def cut(offsets: Tensor, assignments: int, experts: int, tile: PrefillTile) -> tuple[Tensor, Tensor, int]:
    """`tiles`, `count` and `bound` of a `Schedule` for experts whose positions begin at `offsets`."""
    bound = token_tiles(assignments, experts, UNIT * tile.units)
    tiles, count = offsets.new_empty(bound, 4), offsets.new_empty(3)
    padded = triton.next_power_of_2(experts)
    kernels._schedule_kernel[(1,)](offsets, tiles, count, E=experts, EPAD=padded, MOST=tile.units)
    return tiles, count, bound


def schedule(call: Call, experts: int, tile: PrefillTile) -> Schedule:
    """Sorts a call's assignments and cuts them into tiles."""
    slots, offsets = sort_by_expert(call.ids, experts)
    return Schedule(slots, *cut(offsets, call.assignments, experts, tile))


def _launch(number: int, x: Tensor, y: Tensor, call: Call, plan: Schedule, arguments: dict[str, Any]) -> None:
    row_tiles = triton.cdiv(arguments["N"], ROWS)
    grid = min(multiprocessors(x.device), plan.bound * row_tiles)
    kernels._prefill_kernel[(grid,)](
        X=x,
        Y=y,
        WEIGHTS=call.weights,
        SORTED=plan.slots,
        TILES=plan.tiles,
        COUNT=plan.count,
        COUNTER=plan.count[number:],
        STAGE=number,
        **arguments,
    )


def gemm1(layer: Layer, call: Call, plan: Schedule, h: Tensor, tile: PrefillTile) -> None:
    """Fills `h` ``[assignments, intermediate]``, in the order of the sorted slots."""
    p, act = layer.problem, layer.problem.activation
    arguments = _gemm(layer, layer.w13, p.dims.hidden, p.dims.intermediate, tile)
    arguments |= {
        **activation_numbers(act),
        "GATHER": p.top_k,
        "ACT": act.name,
        "GATED": act.gated,
        "WEIGHTED": p.routing.weight_on_input,
    }
    _launch(1, call.x, h, call, plan, arguments)


def gemm2(layer: Layer, call: Call, plan: Schedule, h: Tensor, y: Tensor, tile: PrefillTile) -> None:
    """Fills `y` ``[assignments, hidden]``, by slot."""
    p = layer.problem
    arguments = _gemm(layer, layer.w2, p.dims.intermediate, p.dims.hidden, tile)
    arguments |= {
        "alpha": 1.0,
        "limit": math.inf,
        "GATHER": 0,
        "ACT": "none",
        "GATED": False,
        "WEIGHTED": not p.routing.weight_on_input,
    }
    _launch(2, h, y, call, plan, arguments)


def run(layer: Layer, call: Call, tile: PrefillTile) -> None:
    """Fills ``call.y``."""
    p, t = layer.problem, call.assignments
    plan = schedule(call, p.local_experts, tile)
    h = call.x.new_empty(t, p.dims.intermediate)
    y = call.x.new_empty(t, p.dims.hidden)
    gemm1(layer, call, plan, h, tile)
    gemm2(layer, call, plan, h, y, tile)
    combine(y, call.ids, call.y, p.local_experts)


def _fits(problem: MoEProblem, tile: PrefillTile) -> str:
    weight, act = problem.scheme.weight, problem.activation
    if tile.units not in WIDTHS or tile.leap < 1 or tile.trail < 0:
        return f"{tile} is none of its tiles: units is one of {', '.join(map(str, WIDTHS))}"
    if weight.name not in ("mxfp4", "int4", "int8"):
        return f"it reads mxfp4, int4 and int8 weights, the layer has {weight}"
    if weight.name == "int8" and tile.units > MOST_UNITS_INT8:
        return f"{tile} is too large for int8 weights: units is {MOST_UNITS_INT8} at most"
    if weight.name == "mxfp4" and problem.dtype != "bf16":
        return f"it multiplies mxfp4 weights in bf16, the model's dtype is {problem.dtype}"
    if weight.name != "mxfp4" and scale_name(problem) != problem.dtype:
        return (
            f"its weights are multiplied in their scales' {weight.scale_dtype}, the model is {problem.dtype}"
        )
    if act.name not in (GATED if act.gated else UNGATED):
        return f"it has the activations {', '.join(GATED + UNGATED)}, the layer has {act.name}"
    if stages(problem, tile) < FEWEST_STAGES:
        return f"{tile} leaves no room for {FEWEST_STAGES} stages"
    return ""


def _candidates(problem: MoEProblem) -> list[PrefillTile]:
    return [PrefillTile(units) for units in WIDTHS if not _fits(problem, PrefillTile(units))]


PREFILL_REGIME = Regime(
    PrefillTile, run, _fits, capability=((9, 0), (9, 0)), candidates=_candidates, each=(48, math.inf)
)
