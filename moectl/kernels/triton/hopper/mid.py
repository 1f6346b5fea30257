"""Grouped kernels for SM90 at about 5 to 130 tokens an expert: host code of `mid_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....problem import MoEProblem
from ....schemes import FULL
from ..launch import token_tiles
from ..layer import Call, Layer, Matrix, Regime, activation_numbers, multiprocessors, scale_name
from ..routing import combine, sort_by_expert
from . import epilogue
from . import mid_kernels as kernels
from .fragments import FOLDED_SCALES

WIDTHS: dict[int, tuple[int, ...]] = {
    16: (16,),
    32: (16, 32),
    64: (16, 32, 48, 64),
    96: (32, 64, 96),
    128: (32, 64, 96, 128),
}
"""Most tokens of a tile -> the numbers of token columns that its kernel has a branch for."""

REGISTERS: dict[tuple[int, int], tuple[int, int]] = {
    (2, 1): (216, 80),
    (3, 1): (144, 80),
    (4, 1): (112, 64),
    (2, 2): (96, 48),
}
"""Workers, and programs of a multiprocessor -> registers of a worker's and of a loader's thread."""

MOST_TOKENS: dict[tuple[int, int], int] = {(2, 1): 128, (3, 1): 128, (4, 1): 64, (2, 2): 32}
"""Workers and programs -> most tokens whose sums fit a worker's registers beside the weights."""

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on SM90."""

FORMATS: dict[str, tuple[tuple[str, str], ...]] = {
    "e8m0": (("mxfp4", "bf16"),),
    "bf16": (("int4", "bf16"), ("int8", "bf16")),
    "fp16": (("int4", "fp16"), ("int8", "fp16"), ("int4", "bf16")),
}
"""Scales -> weights and the activations that they are multiplied with: none rounds a weight twice."""

_CODES = gl.NVMMASharedLayout(128, 8, 2)


@dataclass(frozen=True, slots=True)
class MidTile:
    """One launch configuration.

    Attributes:
        tokens: most tokens of a tile, a key of `WIDTHS`.
        workers: warpgroups with 64 weight rows each; with `programs` a key of `REGISTERS`.
        stages: of the ring.
        depth: 64-column pieces of a stage.
        loaders: warps that copy token rows.
        programs: of one multiprocessor at a time.
    """

    tokens: int
    workers: int
    stages: int
    depth: int = 2
    loaders: int = 2
    programs: int = 1


@dataclass(frozen=True)
class Variant:
    """What a GEMM kernel is compiled for: one of a layer's two products, and a tile.

    Attributes:
        stage: 1 or 2, the first or the second GEMM.
        group: columns of one scale; 0: all.
        exact: MXFP4 scales need two products instead of one, see `fragments`.
        split: fp16 scales, bf16 tokens.
        weighted: whether the router's weights are applied here.
        even: no stage of the ring reaches beyond the tokens' columns.
        wide: slots times columns exceed 32 bits.
        registers: of a worker's and a loader's thread.
    """

    stage: int
    format: str
    group: int
    zeros: bool
    exact: bool
    split: bool
    bias: bool
    weighted: bool
    even: bool
    wide: bool
    top_k: int
    activation: str
    gated: bool
    widths: tuple[int, ...]
    workers: int
    stages: int
    depth: int
    loaders: int
    registers: tuple[int, int]

    @property
    def folded(self) -> bool:
        """Whether sums come out times a power of two that MXFP4 scales do not undo."""
        return self.format == "mxfp4" and not self.exact


def _variant(layer: Layer, stage: int, assignments: int, tile: MidTile) -> Variant:
    p = layer.problem
    weight, act = p.scheme.weight, p.activation
    m, columns = (layer.w13, p.dims.hidden) if stage == 1 else (layer.w2, p.dims.intermediate)
    return Variant(
        stage=stage,
        format=weight.name,
        group=0 if weight.group == FULL else weight.group,
        zeros=m.zeros is not None,
        exact=not m.exponents_within(FOLDED_SCALES),
        split=(scale_name(p), p.dtype) == ("fp16", "bf16"),
        bias=m.bias is not None,
        weighted=p.routing.weight_on_input == (stage == 1),
        wide=assignments * p.dims.hidden >= 2**31,
        even=m.k == columns and m.k % (64 * tile.depth) == 0,
        top_k=p.top_k,
        activation=act.name,
        gated=act.gated,
        widths=WIDTHS[tile.tokens],
        workers=tile.workers,
        stages=tile.stages,
        depth=tile.depth,
        loaders=tile.loaders,
        registers=REGISTERS[tile.workers, tile.programs],
    )


@dataclass(frozen=True)
class Schedule:
    """Where each expert's tokens are: sorted slots, and at most `bound` tiles of them.

    Attributes:
        slots: assignments by expert.
        tiles: ``[bound, 4]``: expert, first position in `slots`, tokens, 0.
        count: ``[1]``, how many tiles there are.
    """

    slots: Tensor
    tiles: Tensor
    count: Tensor
    bound: int


def schedule(call: Call, experts: int, tokens: int) -> Schedule:
    """Sorts a call's assignments by expert and cuts them into tiles of up to `tokens`."""
    slots, offsets = sort_by_expert(call.ids, experts)
    bound = token_tiles(call.assignments, experts, tokens)
    tiles, count = call.ids.new_empty(bound, 4), call.ids.new_empty(1)
    kernels._token_tiles_kernel[(triton.cdiv(bound, 16),)](
        offsets,
        tiles,
        count,
        E=experts,
        EPAD=triton.next_power_of_2(experts),
        TOKENS=tokens,
        BLOCK=16,
        launch_pdl=True,
    )
    return Schedule(slots, tiles, count, bound)


def gemm(layer: Layer, stage: int, call: Call, plan: Schedule, x: Tensor, y: Tensor, tile: MidTile) -> None:
    """Fills `y`: activations of the first GEMM by sorted position, or of the second the parts by slot.

    Args:
        x: the tokens, or the first GEMM's result.
    """
    p, m = layer.problem, layer.w13 if stage == 1 else layer.w2
    how = _variant(layer, stage, call.assignments, tile)
    row_tiles = triton.cdiv(m.n, 64 * tile.workers)
    grid = min(tile.programs * multiprocessors(x.device), plan.bound * row_tiles)
    kernels._grouped_gemm_kernel[(grid,)](
        X=x,
        CODES=_descriptor(m, tile.depth),
        S=m.scales,
        Z=m.scales if m.zeros is None else m.zeros,
        B=m.scales if m.bias is None else m.bias,
        Y=y,
        SORTED=plan.slots,
        TILES=plan.tiles,
        COUNT=plan.count,
        WEIGHTS=call.weights,
        N=m.n,
        K=m.k,
        KX=x.shape[1],
        NX=y.shape[1],
        row_tiles=row_tiles,
        **activation_numbers(p.activation),
        HOW=how,
        num_warps=4,
        maxnreg=launch_registers(tile),
        launch_pdl=True,
    )


def launch_registers(tile: MidTile) -> int:
    """Registers of a thread before workers take from loaders: what all programs of a multiprocessor share."""
    loading = 4  # a warpgroup: token loaders, the weight loader and idle warps
    return 65536 // (32 * (4 * tile.workers + loading) * tile.programs) // 8 * 8


def _descriptor(m: Matrix, depth: int) -> TensorDescriptor:
    """The codes as lines of 128 bytes; a copy moves `depth` tiles."""
    lines = m.codes.shape[-1] // 128
    return TensorDescriptor.from_tensor(m.codes.view(-1, 128), [depth * lines, 128], _CODES)


def _run(layer: Layer, call: Call, tile: MidTile) -> None:
    p, t = layer.problem, call.assignments
    plan = schedule(call, p.local_experts, tile.tokens)
    h = call.x.new_empty(t, p.dims.intermediate)
    parts = call.x.new_empty(t, p.dims.hidden)
    gemm(layer, 1, call, plan, call.x, h, tile)
    gemm(layer, 2, call, plan, h, parts, tile)
    combine(parts, call.ids, call.y, p.local_experts)


def shared_bytes(problem: MoEProblem, tile: MidTile) -> int:
    """Shared memory of a program: its ring, slots and weights of each worker's tile, a store's detour."""
    weight = problem.scheme.weight
    words = 2 if weight.name != "mxfp4" and weight.group == 32 else 1
    words *= 128 * triton.next_power_of_2(tile.workers) * (2 if weight.zero_point else 1)
    stage = tile.depth * (128 * tile.tokens + 512 * weight.bits * tile.workers + words) + 16
    notes = 8 * triton.next_power_of_2(tile.tokens) + 64 * 32 * 2 + 512
    return int(tile.stages * stage + tile.workers * notes + 1024)


def _fits(problem: MoEProblem, tile: MidTile) -> str:
    weight, act = problem.scheme.weight, problem.activation
    place = (tile.workers, tile.programs)
    if tile.tokens not in WIDTHS or place not in REGISTERS or tile.loaders not in (1, 2):
        return f"{tile} is none of its tiles"
    if tile.stages < 2:
        return f"{tile} has no stage to fill while another is read"
    if tile.tokens > MOST_TOKENS[place]:
        return f"{tile} does not fit the registers of its workers"
    shared = tile.programs * shared_bytes(problem, tile)
    if tile.depth not in (1, 2, 4) or shared > SHARED_MEMORY:
        return f"{tile} needs {shared} bytes of shared memory, there are {SHARED_MEMORY}"
    if (weight.name, problem.dtype) not in FORMATS.get(scale_name(problem), ()):
        return f"it has no {problem.dtype} products of {weight} weights with {scale_name(problem)} scales"
    if weight.group not in (32, FULL) and weight.group % 64:
        return f"it reads scale groups of 32, of multiples of 64 and of rows, not of {weight.group}"
    if act.name not in (epilogue.GATED if act.gated else epilogue.UNGATED):
        return f"it does not know the activation {act}"
    return ""


PROMISING: tuple[tuple[int, int, int, int], ...] = (
    (16, 4, 1, 4),
    (16, 4, 1, 2),
    (32, 4, 1, 2),
    (32, 2, 2, 2),
    (64, 4, 1, 2),
    (64, 3, 1, 2),
    (96, 3, 1, 2),
    (128, 3, 1, 2),
)
"""(tokens, workers, programs, depth) that are worth a measurement, as found on an H200."""

STAGES = (8, 6, 5, 4, 3, 2)


def _candidates(problem: MoEProblem) -> Sequence[MidTile]:
    """Each with the deepest ring that fits: it hides the most latency."""
    found = []
    for tokens, workers, programs, depth in PROMISING:
        rings = (MidTile(tokens, workers, stages, depth, programs=programs) for stages in STAGES)
        found += [tile for tile in rings if not _fits(problem, tile)][:1]
    return found


MID_REGIME = Regime(
    MidTile, _run, _fits, capability=((9, 0), (9, 0)), candidates=_candidates, each=(3.0, 130.0)
)
