"""Kernel family `tma`: grouped GEMMs for SM90 on weights that are stored row by row; host code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....capabilities.own_kernels import GATED, UNGATED
from ....problem.moe_problem import MoEProblem
from ....problem.schemes import FULL
from ...choice.tile_family import SHARED_MEMORY, SIZE_MULTIPLE
from ..kernel_family import KernelCall, KernelFamily, activation_numbers, multiprocessors
from ..row_matrix import RowLayer, RowMatrix, token_format
from ..sort_and_combine import TokenTiles, finish, token_tiles_of
from ..token_codes import ALL_ROWS, LiveRows, quantize_rows, scale_kind
from . import tma_kernels as kernels

WIDTHS: dict[int, tuple[int, ...]] = {
    8: (8,),
    16: (8, 16),
    32: (8, 16, 32),
    64: (16, 32, 48, 64),
    96: (32, 64, 80, 96),
    112: (64, 80, 96, 112),
    128: (32, 64, 80, 96, 112, 128),
    160: (64, 96, 128, 144, 160),
    192: (64, 96, 128, 160, 192),
    256: (64, 128, 192, 256),
}
"""Most tokens of a tile -> the widths in token columns for which its kernel has branches."""

LINE = 128
"""Bytes of each row in a piece of the ring."""

_ROWS = gl.NVMMASharedLayout(128, 8, 5)
_TOKENS = gl.NVMMASharedLayout(128, 8, 2)


@dataclass(frozen=True, slots=True)
class TmaTile:
    """One launch configuration.

    Attributes:
        tokens: most tokens of a tile, a key of `WIDTHS`.
        workers: consumer warpgroups, 1 or 2.
        blocks_m: blocks of 64 weight rows (M of wgmma) per worker.
        stages: stages of the shared memory ring.
        depth: pieces of 128 bytes of each row per stage.
        loaders: warps that copy token rows (producers).
        programs: programs resident on one multiprocessor.
        group_m: token tiles that sweep all weight rows together, to reuse weights in L2.
        fast_sums: 1 if sums of FP8 products stay in the tensor cores, which add with fewer bits than fp32, to
            the end; 0 if sums of 128 columns are added in fp32. Scales in blocks need the latter.
    """

    tokens: int
    workers: int
    blocks_m: int
    stages: int
    depth: int = 1
    loaders: int = 2
    programs: int = 1
    group_m: int = 1
    fast_sums: int = 0

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return 64 * self.workers * self.blocks_m


@dataclass(frozen=True)
class TmaVariant:
    """Compile-time parameters of a GEMM kernel.

    Attributes:
        stage: 1 or 2, the first or the second GEMM.
        kind: operand type, a key of `shared_wgmma.KINDS`.
        scales: what has a scale in the weights: ``none``, a ``block``, a ``channel``, or the ``tensor``.
        token_scales: what has one in the tokens: ``none``, a ``block``, a ``token``, or the ``tensor``.
        weighted: whether the router's weights are applied in this GEMM.
        experts: the number of experts if tiles are a single token's ids, otherwise 0.
        even: whether every stage of the ring ends within the tokens' columns.
        wide: whether offsets (slots times columns) need more than 32 bits.
        copied: whether TMA copies the tokens, which lie one after the other; otherwise they are gathered.
        promoted: whether sums of 128 columns are added outside of the tensor cores.
        registers: registers per thread of a worker, of a token loader, and of the weight loader.
    """

    stage: int
    kind: str
    scales: str
    token_scales: str
    bias: bool
    weighted: bool
    top_k: int
    experts: int
    even: bool
    wide: bool
    activation: str
    gated: bool
    widths: tuple[int, ...]
    workers: int
    blocks_m: int
    stages: int
    depth: int
    loaders: int
    copied: bool
    promoted: bool
    registers: tuple[int, int, int]

    @property
    def exact(self) -> bool:
        """Nothing is folded into the weights (`mid_epilogue`)."""
        return True

    @property
    def halves(self) -> int:
        """Experts have no factors that the epilogue applies (`mid_epilogue`)."""
        return 0


def _loader_groups(tile: TmaTile) -> int:
    """Warpgroups of the token loaders and the weight loader, which is one warp."""
    return math.ceil((tile.loaders + 1) / 4)


def launch_registers(tile: TmaTile) -> int:
    """Registers per thread at launch, before they are redistributed from loaders to workers."""
    groups = tile.workers + _loader_groups(tile)
    return min(168, 65536 // (128 * groups * tile.programs) // 8 * 8)


def registers(tile: TmaTile, promoted: bool = False) -> tuple[int, int, int]:
    """Registers per thread of a worker, of a token loader, and of the weight loader.

    `promoted` sums of FP8 products, which are not added yet, take registers of a worker.
    """
    at_first, groups = launch_registers(tile), _loader_groups(tile)
    few = groups > 1 or (promoted and 96 < tile.tokens <= 128)  # loaders have addresses of tokens in theirs
    tokens = min(at_first, 56 if few else 72)
    weights = tokens if groups == 1 else 40  # in one warpgroup all have the same number
    of_loaders = tokens + (groups - 1) * weights
    worker = (at_first * (tile.workers + groups) - of_loaders) // tile.workers // 8 * 8
    return min(240, worker), tokens, weights


def _variant(layer: RowLayer, stage: int, plan: TokenTiles, tile: TmaTile) -> TmaVariant:
    p, act = layer.problem, layer.problem.activation
    m = layer.w13 if stage == 1 else layer.w2
    form = token_format(p)
    return TmaVariant(
        stage=stage,
        kind="fp8" if p.scheme.weight.name == "fp8" else p.dtype,
        scales=weight_scales(p),
        token_scales="none" if form is None else scale_kind(form),
        bias=m.bias is not None,
        weighted=p.routing.weight_on_input == (stage == 1),
        top_k=p.top_k,
        experts=p.local_experts if plan.tiles.ndim == 1 else 0,
        even=_row_bytes(m) % (LINE * tile.depth) == 0,
        wide=len(plan.slots) * p.dims.hidden * 2 >= 2**31,
        activation=act.name,
        gated=act.gated,
        widths=WIDTHS[tile.tokens],
        workers=tile.workers,
        blocks_m=tile.blocks_m,
        stages=tile.stages,
        depth=tile.depth,
        loaders=tile.loaders,
        copied=_copied(stage, tile),
        promoted=_promoted(p, tile),
        registers=registers(tile, _promoted(p, tile)),
    )


def _promoted(problem: MoEProblem, tile: TmaTile) -> bool:
    """Whether sums of FP8 products are added in fp32."""
    return problem.scheme.weight.name == "fp8" and not tile.fast_sums


def _copied(stage: int, tile: TmaTile) -> bool:
    """Whether TMA copies tokens. Those of the second GEMM lie one after the other; few are there sooner if
    threads gather them."""
    return stage == 2 and tile.tokens > 32


def weight_scales(problem: MoEProblem) -> str:
    """What has a scale in the layer's weights: ``none``, a ``block``, a ``channel``, or the ``tensor``."""
    if problem.scheme.weight.name != "fp8":
        return "none"
    rows, columns = problem.scheme.weight.block
    return "tensor" if rows == FULL else "channel" if columns == FULL else "block"


def _row_bytes(m: RowMatrix) -> int:
    return m.k * m.weights.element_size()


def rows_descriptor(m: RowMatrix, gated: bool, blocks: int) -> TensorDescriptor:
    """The rows of `blocks` row blocks, in the order in which a copy brings them.

    Dimensions are experts, groups of 16 rows, the two halves of a group, 8 rows, and bytes. If `gated`, a
    group has 8 gate rows, then the 8 up rows that belong to them.
    """
    weights = m.weights.view(torch.uint8)
    experts, n, k = len(weights), m.n, _row_bytes(m)
    group, half = (8, n // 2) if gated else (16, 8)
    strides = [n * k, group * k, half * k, k, 1]
    shape = [experts, n // 16, 2, 8, k]
    return TensorDescriptor(weights, shape, strides, [1, 4 * blocks, 2, 8, LINE], _ROWS)


def tokens_descriptor(x: Tensor, tile: TmaTile) -> TensorDescriptor:
    """Rows `x` in the batches in which they are copied."""
    rows = x.view(torch.uint8)
    batch = min(tile.tokens & -tile.tokens, 64)
    return TensorDescriptor.from_tensor(rows, [batch, LINE], _TOKENS)


def gemm(
    layer: RowLayer,
    stage: int,
    call: KernelCall,
    plan: TokenTiles,
    x: Tensor,
    scales: Tensor | None,
    y: Tensor,
    tile: TmaTile,
) -> None:
    """Computes one GEMM into `y`: stage 1 activations by sorted position, stage 2 partial results by slot.

    Args:
        x: the tokens, or the first GEMM's output; codes of them if the weights are FP8.
        scales: scales of the codes.
    """
    p, m = layer.problem, layer.w13 if stage == 1 else layer.w2
    row_tiles = triton.cdiv(m.n, tile.rows)
    grid = min(tile.programs * multiprocessors(x.device), plan.bound * row_tiles)
    rows = rows_descriptor(m, stage == 1 and p.activation.gated, tile.workers * tile.blocks_m)
    kernels._rows_gemm_kernel[(grid,)](
        X=x.view(torch.uint8),
        COPIES=tokens_descriptor(x, tile) if _copied(stage, tile) else rows,
        XS=x if scales is None else scales,
        ROWS=rows,
        S=x if m.scales is None else m.scales,
        B=x if m.bias is None else m.bias,
        Y=y,
        SORTED=plan.slots,
        TILES=plan.tiles,
        COUNT=plan.count,
        WEIGHTS=call.weights,
        N=m.n,
        steps=triton.cdiv(_row_bytes(m), LINE * tile.depth),
        KX=_row_bytes(m),
        NX=y.shape[1],
        row_tiles=row_tiles,
        group_m=tile.group_m,
        bound=plan.bound,
        **activation_numbers(p.activation),
        HOW=_variant(layer, stage, plan, tile),
        num_warps=4,
        maxnreg=launch_registers(tile),
        launch_pdl=True,
    )


def one_token(call: KernelCall) -> TokenTiles | None:
    """The schedule of a call of one token, whose ids are its tiles: there is nothing to sort. Else None."""
    if len(call.x) != 1 or call.order is not None:
        return None
    return TokenTiles(call.ids, call.ids, call.ids, call.ids)


def _run(layer: RowLayer, call: KernelCall, tile: TmaTile) -> None:
    p, t = layer.problem, call.assignments
    planned = one_token(call)
    plan = planned or token_tiles_of(call, p.local_experts, tile.tokens)
    by_slot = LiveRows("slots", call.ids, p.local_experts)
    # Rows of a batch that hold no token may hold anything.
    filled = ALL_ROWS if call.order is None else by_slot
    x, scales = _quantized(p, call.x, layer.w13, filled, beside=planned is None)
    h = call.x.new_empty(t, p.dims.intermediate)
    parts = call.parts()
    gemm(layer, 1, call, plan, x, scales, h, tile)
    live = by_slot if planned else LiveRows("sorted", plan.offsets, p.local_experts)
    h, scales = _quantized(p, h, layer.w2, live)
    gemm(layer, 2, call, plan, h, scales, parts, tile)
    finish(call, parts, p.local_experts)


def _quantized(
    problem: MoEProblem, x: Tensor, m: RowMatrix, live: LiveRows, beside: bool = False
) -> tuple[Tensor, Tensor | None]:
    """What enters the GEMM of `m`, and its scales; `beside` the schedule, which reads other inputs."""
    form = token_format(problem)
    if form is None:
        return x, None
    made = quantize_rows(x, form, m.token_scale, live, beside=beside)
    return made.codes, made.scales


def shared_bytes(problem: MoEProblem, tile: TmaTile) -> int:
    """Shared memory of a program: the ring, and each worker's slots, router weights and store staging."""
    notes = 4 * triton.next_power_of_2(tile.tokens)
    scales = weight_scales(problem)
    in_piece = 2 * notes if scales == "block" else 0
    by_token = notes * (2 if scales in ("none", "block") else 3)
    stage = tile.depth * (LINE * (tile.rows + tile.tokens) + in_piece) + 16
    return int(tile.stages * stage + tile.workers * (by_token + 2048) + 512)


def _fits(problem: MoEProblem, tile: TmaTile) -> str:
    weight, act, dims = problem.scheme.weight, problem.activation, problem.dims
    if tile.tokens not in WIDTHS or tile.workers not in (1, 2) or tile.blocks_m not in (1, 2):
        return f"{tile} is not a supported tile"
    if tile.depth not in (1, 2, 4) or tile.loaders not in (1, 2, 4) or min(tile.programs, tile.group_m) < 1:
        return f"{tile} is not a supported tile"
    if tile.stages < 2:
        return f"{tile} needs two stages: one to fill while another is read"
    if tile.fast_sums and weight_scales(problem) not in ("channel", "tensor"):
        return f"{tile} leaves sums in the tensor cores to the end; {problem.scheme} does not allow that"
    promoted = int(_promoted(problem, tile))  # sums that are not added yet, and scales
    sums = tile.tokens * (tile.blocks_m + promoted) // 2 + 12 * promoted * tile.blocks_m
    if sums + (8 if promoted else 16) > registers(tile, bool(promoted))[0]:
        return f"the accumulators of {tile} do not fit in the registers of its workers"
    shared = tile.programs * shared_bytes(problem, tile)
    if shared > SHARED_MEMORY:
        return f"{tile} needs {shared} bytes of shared memory; SM90 has {SHARED_MEMORY}"
    if weight.name not in ("bf16", "fp8"):
        return f"it does not support {weight} weights"
    if weight.name == "fp8" and token_format(problem) is None:
        return f"it multiplies {weight} weights with FP8 tokens only; the layer has 16-bit ones"
    for name, size in (("hidden", dims.hidden), ("intermediate", dims.intermediate)):
        if size % SIZE_MULTIPLE:
            return f"it needs sizes that are multiples of {SIZE_MULTIPLE}; the layer's {name} size is {size}"
    if act.name not in (GATED if act.gated else UNGATED):
        return f"it does not support the activation {act}"
    return ""


def _tile(tokens: int, workers: int, blocks_m: int, **more: int) -> TmaTile:
    return TmaTile(tokens, workers, blocks_m, stages=2, **more)


_FEW_FP8 = (
    (1.02, _tile(8, 1, 1, depth=2, programs=3)),
    (2.6, _tile(8, 1, 2, depth=2)),
    (10, _tile(16, 2, 1, depth=2)),
    (22, _tile(32, 1, 2, programs=2)),
    (48, _tile(64, 2, 2)),
    (100, _tile(96, 2, 2)),
)

RULES: dict[str, tuple[tuple[float, TmaTile], ...]] = {
    "bf16": (
        (1.02, _tile(8, 1, 1, depth=2)),
        (2.6, _tile(8, 1, 2, depth=2)),
        (10, _tile(16, 2, 1, depth=2)),
        (22, _tile(32, 1, 2, programs=2)),
        (40, _tile(64, 2, 2)),
        (80, _tile(96, 2, 2)),
        (150, _tile(128, 2, 2, group_m=4)),
        (350, _tile(96, 2, 2, loaders=4, group_m=4)),
        (math.inf, _tile(128, 2, 2, group_m=4)),
    ),
    "fp8": (
        *_FEW_FP8,
        (200, _tile(160, 2, 1, loaders=4, group_m=4)),
        (math.inf, _tile(128, 2, 2, group_m=4)),
    ),
    "fp8 at end": (*_FEW_FP8, (math.inf, _tile(128, 2, 2, group_m=4, fast_sums=1))),
}
"""Weight format, and whether FP8 weights are scaled at the end (by row or tensor) -> (most tokens per expert,
tile): what runs if nothing was measured. All but the stages."""

PROMISING: tuple[TmaTile, ...] = (
    *dict.fromkeys(tile for rules in RULES.values() for _, tile in rules),
    _tile(8, 1, 1, depth=2, programs=2),
    _tile(16, 1, 2, programs=2),
    _tile(32, 2, 2),
    _tile(64, 2, 1),
    _tile(96, 2, 1, loaders=4),
    _tile(112, 2, 2, group_m=4),
    _tile(160, 2, 1, loaders=4),
    _tile(96, 2, 2, group_m=4, fast_sums=1),
    _tile(96, 2, 2, loaders=4, group_m=4, fast_sums=1),
    _tile(192, 2, 1, loaders=4, group_m=4, fast_sums=1),
    _tile(256, 2, 1, group_m=4, fast_sums=1),
)
"""Tiles that are worth measuring, but for the stages."""

STAGES = (12, 10, 8, 7, 6, 5, 4, 3)


def _with_stages(problem: MoEProblem, tile: TmaTile) -> TmaTile | None:
    """`tile` with as many stages as fit, which hide more latency; None if it does not fit."""
    rings = (replace(tile, stages=stages) for stages in STAGES)
    return next((tile for tile in rings if not _fits(problem, tile)), None)


def _candidates(problem: MoEProblem) -> Sequence[TmaTile]:
    tiles = (_with_stages(problem, tile) for tile in PROMISING)
    return [tile for tile in tiles if tile is not None]


def tile_for(problem: MoEProblem, tokens_per_expert: float) -> TmaTile | None:
    """The tile of `RULES` for a number of tokens per active expert; None if it does not fit the layer."""
    weight = problem.scheme.weight.name
    rules = RULES["fp8 at end"] if weight_scales(problem) in ("channel", "tensor") else RULES.get(weight, ())
    return next((_with_stages(problem, tile) for most, tile in rules if tokens_per_expert <= most), None)


def _suits(tile: TmaTile, tokens_per_expert: float) -> bool:
    """Neither do most experts need several tiles where one could do, nor are tiles mostly empty."""
    return 0.7 * min(tokens_per_expert, 128) <= tile.tokens <= max(16, 8 * tokens_per_expert)


TMA_FAMILY = KernelFamily(
    tile=TmaTile,
    run=_run,
    fits=_fits,
    capability=((9, 0), (9, 0)),
    candidates=_candidates,
    suits=_suits,
)
