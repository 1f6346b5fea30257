"""Launches of the kernel family `tma`: weights in rows of 16, 8 or 4 bits on SM90, and any tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...capabilities.own_kernels import GATED, UNGATED, in_rows, token_format
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL
from .launch import tile_words
from .launch_shape import GemmShape, LaunchShape
from .tile_family import (
    REGISTERS,
    SHARED_MEMORY,
    SIZE_MULTIPLE,
    TileFamily,
    next_power_of_2,
    quantizing_binaries,
    weight_scales,
)

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

TURNED_WIDTHS = (64, 128)
"""The same for tiles whose tokens are the rows of products, of which each has 64."""

LINE = 128
"""Bytes of each row in a piece of the ring."""


@dataclass(frozen=True, slots=True)
class TmaTile:
    """One launch configuration.

    Attributes:
        tokens: most tokens of a tile, a key of `WIDTHS`.
        workers: consumer warpgroups, 1 or 2.
        blocks_m: blocks of 64 weight rows (M of wgmma) per worker.
        stages: stages of the shared memory ring.
        depth: pieces of 128 bytes of each row per stage.
        loaders: warps that copy token rows (producers), 2 or 4.
        programs: programs resident on one multiprocessor.
        group_m: token tiles that sweep all weight rows together, to reuse weights in L2.
        fast_sums: 1 if sums of FP8 products stay in the tensor cores, which add with fewer bits than fp32, to
            the end; 0 if sums of 128 columns are added in fp32. Scales in blocks need the latter.
        turned: 1 if tokens are the rows of products and weight rows their columns. A thread then has two
            tokens, whose scales stay in registers while it adds up a sum of 128 columns; otherwise it loads
            those of a quarter of the tile's tokens for each sum. For scales in blocks, 128 tokens and 256
            weight rows: a worker has 64 tokens, or if there are no more than that, half of the weight rows.
            Not for biases, router weights that multiply tokens, or layers without a gate: ptxas spills the
            registers of those kernels.
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
    turned: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of tokens for which the kernel has branches."""
        return TURNED_WIDTHS if self.turned else WIDTHS[self.tokens]

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return 64 * self.workers * self.blocks_m

    @property
    def quantizes(self) -> bool:
        """Whether the first GEMM stores its activations as codes with scales: a program of turned tiles has
        all of the 128 columns that share one."""
        return bool(self.turned)

    @property
    def jobs(self) -> int:
        """Tiles that a program has been told of and has not finished yet, at most.

        Their slots, router weights and scales are in shared memory, which more of them would take from the
        stages of wide tiles.
        """
        return 4 if self.tokens <= 64 or self.turned else 2


def _loader_groups(tile: TmaTile) -> int:
    """Warpgroups of the token loaders, the weight loader and the scheduler, which are one warp each."""
    return math.ceil((tile.loaders + 2) / 4)


def launch_registers(tile: TmaTile) -> int:
    """Registers per thread at launch, before they are redistributed from loaders to workers."""
    groups = tile.workers + _loader_groups(tile)
    return min(168, REGISTERS // (128 * groups * tile.programs) // 8 * 8)


def shares_rows(problem: MoEProblem, tile: TmaTile) -> bool:
    """Whether loaders keep the rows of a tile's tokens in shared memory: workers with so many sums, fewer
    where they also decode weights, or with int32 sums beside those in fp32, leave loaders too few registers
    for addresses. Only where TMA copies the second GEMM's tokens: `tma_loader` shares rows of the first GEMM
    alone."""
    many = tile.tokens * tile.blocks_m > 256 or (decodes(problem) and tile.tokens > 64)
    return many or sums_twice(problem, tile)


def decodes_ahead(problem: MoEProblem, tile: TmaTile) -> bool:
    """Whether a worker decodes the next weights while it multiplies the last ones. Where sums leave too few
    registers for that, one worker decodes while the other multiplies."""
    return decodes(problem) and not sums_twice(problem, tile) and tile.tokens * tile.blocks_m <= 128


def sums_twice(problem: MoEProblem, tile: TmaTile) -> bool:
    """Whether int32 sums of INT4 products, and those in fp32, take most registers of a worker, which does not
    decode ahead then."""
    return problem.scheme.weight.bits == 4 and tile.tokens > 32


def registers(problem: MoEProblem, tile: TmaTile, stage: int = 1) -> tuple[int, int, int]:
    """Registers per thread of a worker, of a token loader, and of the weight loader and the scheduler.

    Promoted sums, which are not added yet, take registers of a worker; scales in blocks take those of a
    loader. The workers of turned tiles get fewer in the first GEMM: with more, ptxas keeps
    two sums at a time, for which there are not enough.
    """
    at_first, groups = launch_registers(tile), _loader_groups(tile)
    promoted, blocks = is_promoted(problem, tile), weight_scales(problem) == "block"
    # Loaders have the addresses of tokens in registers; workers need the more of them, the wider sums are.
    if tile.turned:
        spare = 64 if stage == 1 else 56
    elif sums_twice(problem, tile):
        spare = 56 if tile.blocks_m == 2 else 96 if tile.tokens == 128 else 72
    elif decodes(problem) and tile.tokens > 64:
        spare = (48 if tile.blocks_m == 1 else 56) if promoted else 40 if stage == 1 else 48
    elif shares_rows(problem, tile):
        spare = 40
    elif promoted:
        spare = {112: 56, 128: 64 if blocks else 56}.get(tile.tokens, 72)
    else:
        spare = 80 if tile.tokens > 192 else 72
    tokens = min(at_first, 64 if groups > 1 else spare)
    weights = tokens if groups == 1 else 40  # in one warpgroup all have the same number
    of_loaders = tokens + (groups - 1) * weights
    worker = (at_first * (tile.workers + groups) - of_loaders) // tile.workers // 8 * 8
    return min(240, worker), tokens, weights


def decodes(problem: MoEProblem) -> bool:
    """Whether weights are decoded to the dtype of the tokens: FP8 for 16-bit tokens (W8A16), or INT4 for INT8
    ones (W4A8).

    FP8 weights are where the layer asks for it: with FP8 tokens, quantizing them costs less than decoding.
    """
    weight = problem.scheme.weight
    return weight.bits == 4 or (weight.name == "fp8" and token_format(problem) is None)


def token_lines(problem: MoEProblem) -> int:
    """Lines of 128 bytes of a token that a line of weights is multiplied by."""
    return 2 if decodes(problem) else 1


def is_promoted(problem: MoEProblem, tile: TmaTile) -> bool:
    """Whether sums of 128 columns are added in fp32, outside of the tensor cores."""
    if decodes(problem):  # tensor cores add products of 16 bits like fp32; scales by columns part sums
        return weight_scales(problem) in ("block", "group")
    return problem.scheme.weight.name == "fp8" and not tile.fast_sums


def shared_bytes(problem: MoEProblem, tile: TmaTile) -> int:
    """Shared memory of a program: the ring, what each job needs, and each worker's store staging."""
    notes = 4 * next_power_of_2(tile.tokens)
    scales = weight_scales(problem)
    of_groups = 2 * tile.rows * (4 if problem.scheme.weight.scale_dtype == "F32" else 2)
    in_piece = {"block": 2 * notes, "group": of_groups}.get(scales, 0)
    by_token = notes * (2 if scales in ("none", "block") or token_format(problem) is None else 3)
    staging = 8192 if tile.turned else 2048
    stage = tile.depth * (LINE * (tile.rows + token_lines(problem) * tile.tokens) + in_piece) + 16
    job = by_token + 4 * 4 + 3 * 8  # its four words and three barriers
    # Only the first GEMM has rows of tokens there: mostly in place of router weights, which take more.
    rows = notes if shares_rows(problem, tile) and problem.routing.weight_on_input else 0
    # The last bytes are for what partitions capture, and for alignment.
    return int(tile.stages * stage + tile.jobs * job + rows + tile.workers * staging + 128)


def refusal(problem: MoEProblem, tile: TmaTile) -> str:
    """Why `tile` cannot run a layer, in a sentence; empty if it can."""
    weight, act, dims = problem.scheme.weight, problem.activation, problem.dims
    if tile.tokens not in WIDTHS or tile.workers not in (1, 2) or tile.blocks_m not in (1, 2):
        return f"{tile} is not a supported tile"
    if tile.depth not in (1, 2, 4) or tile.loaders not in (2, 4) or min(tile.programs, tile.group_m) < 1:
        return f"{tile} is not a supported tile"
    if tile.stages < 2:
        return f"{tile} needs two stages: one to fill while another is read"
    if tile.fast_sums and (weight.name != "fp8" or weight_scales(problem) == "block"):
        return f"{tile} leaves sums in the tensor cores to the end; {problem.scheme} does not allow that"
    if tile.turned and weight_scales(problem) != "block":
        return f"{tile} is for weights with scales in blocks"
    if tile.turned and (tile.tokens, tile.rows, tile.workers) != (128, 256, 2):
        return f"{tile} needs two workers, 128 tokens and 256 weight rows"
    if tile.turned and (problem.bias or problem.routing.weight_on_input or not act.gated):
        return f"{tile} is for gated layers without biases that multiply by the router's weights last"
    if decodes(problem) and (tile.turned or tile.fast_sums):
        return f"{tile} is for FP8 tokens; the layer has {problem.scheme}"
    if decodes(problem) and tile.tokens * tile.blocks_m > most_decoding(problem):
        return f"{tile} needs more registers than there are; decoded weights take some"
    promoted = int(is_promoted(problem, tile))  # sums that are not added yet, and scales
    sums = (
        tile.tokens * (tile.blocks_m + promoted) // 2 + (4 if tile.turned else 12) * promoted * tile.blocks_m
    )
    if decodes(problem):
        sums += 48 if decodes_ahead(problem, tile) else 32  # one operand, or also the next one
    elif not promoted:
        sums += 16
    if sums > registers(problem, tile)[0]:
        return f"the accumulators of {tile} do not fit in the registers of its workers"
    shared = tile.programs * shared_bytes(problem, tile)
    if shared > SHARED_MEMORY:
        return f"{tile} needs {shared} bytes of shared memory; SM90 has {SHARED_MEMORY}"
    if not in_rows(problem):
        return f"it does not support {weight} weights and {problem.scheme.act} tokens"
    if weight.name == "int8" and max(dims.hidden, dims.intermediate) > MOST_INT8_COLUMNS:
        return f"sums of more than {MOST_INT8_COLUMNS} INT8 products may not fit in 32 bits"
    form = token_format(problem)
    if form is not None and (weight_scales(problem) == "block") != (FULL not in form.block):
        return (
            f"it takes scales in blocks of weights and tokens or of neither; the layer has {problem.scheme}"
        )
    for name, size in (("hidden", dims.hidden), ("intermediate", dims.intermediate)):
        if size % SIZE_MULTIPLE:
            return f"it needs sizes that are multiples of {SIZE_MULTIPLE}; the layer's {name} size is {size}"
    if act.name not in (GATED if act.gated else UNGATED):
        return f"it does not support the activation {act}"
    return ""


def _tile(tokens: int, workers: int, blocks_m: int, **more: int) -> TmaTile:
    return TmaTile(tokens, workers, blocks_m, stages=2, **more)


PROMISING: tuple[TmaTile, ...] = (
    _tile(8, 1, 1, depth=2),
    _tile(8, 1, 2, depth=2),
    _tile(16, 2, 1, depth=2),
    _tile(32, 1, 2, programs=2),
    _tile(64, 2, 2),
    _tile(96, 2, 2),
    _tile(128, 2, 2, group_m=4),
    _tile(96, 2, 2, loaders=4, group_m=4),
    _tile(8, 1, 1, depth=4),
    _tile(8, 1, 1, depth=2, programs=3),
    _tile(160, 2, 1, loaders=4, group_m=4),
    _tile(128, 2, 2, group_m=4, turned=1),
    _tile(128, 2, 2, turned=1),
    _tile(128, 2, 2, group_m=4, fast_sums=1),
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
    _tile(192, 2, 2, group_m=4),
    _tile(192, 2, 2, group_m=4, fast_sums=1),
    _tile(160, 2, 2, group_m=4),
    _tile(160, 2, 2, group_m=4, fast_sums=1),
    _tile(160, 2, 1, loaders=4, fast_sums=1),
    _tile(256, 2, 1, group_m=4, fast_sums=1),
)
"""Tiles that are worth measuring, but for the stages."""

DECODING: tuple[TmaTile, ...] = (
    _tile(8, 1, 1, depth=2, programs=3),
    _tile(8, 1, 1, depth=2, programs=2),
    _tile(8, 1, 1, depth=4),
    _tile(16, 1, 1, programs=3),
    _tile(16, 1, 1, depth=2, programs=2),
    _tile(16, 1, 2, programs=2),
    _tile(32, 1, 2, programs=2),
    _tile(64, 2, 1),
    _tile(128, 2, 1),
    _tile(96, 2, 2, group_m=4),
    _tile(128, 2, 2, group_m=4),
)
"""The same for layers whose weights are decoded."""

INT4: tuple[TmaTile, ...] = (
    _tile(8, 1, 1, depth=2, programs=3),
    _tile(8, 1, 1, depth=2, programs=2),
    _tile(8, 1, 1, depth=4),
    _tile(16, 1, 1, depth=2, programs=2),
    _tile(16, 1, 2, programs=2),
    _tile(32, 1, 1, programs=2),
    _tile(32, 1, 2, programs=2),
    _tile(64, 2, 1),
    _tile(64, 2, 1, group_m=4),
    _tile(64, 2, 2, group_m=4),
    _tile(96, 2, 1, group_m=4),
    _tile(128, 2, 1, group_m=4),
)
"""The same for INT4 weights and INT8 tokens."""


def most_decoding(problem: MoEProblem) -> int:
    """Tokens times row blocks of a worker, at most, of a tile that decodes; ptxas spills registers of larger
    ones, and of some smaller ones that are no candidates. Some epilogues need more of them."""
    if problem.bias or problem.routing.weight_on_input or problem.activation.name in WIDE_EPILOGUES:
        return 64
    if problem.scheme.weight.bits == 4:
        return 128
    return 192 if weight_scales(problem) == "block" else 256


WIDE_EPILOGUES = ("swigluoai", "situ")
"""Activation functions that need more registers than others."""

MOST_INT8_COLUMNS = (2**31 - 1) // (128 * 127)
"""Columns of which the largest INT8 products, of -128 and 127, add up to no more than an int32 holds."""

STAGES = (12, 10, 8, 7, 6, 5, 4, 3)

MOST_WITHOUT_SWEEPS = 64
"""Experts up to which turned tiles without sweeps of several token tiles are candidates. With 8 to 32 experts
they take 0.91 to 1.04 times as long as those with sweeps, with 128 and 256 experts 0.98 to 1.07 times."""


def _with_stages(problem: MoEProblem, tile: TmaTile) -> TmaTile | None:
    """`tile` with as many stages as fit, which hide more latency; None if it does not fit."""
    rings = (replace(tile, stages=stages) for stages in STAGES)
    return next((tile for tile in rings if not refusal(problem, tile)), None)


def candidates(problem: MoEProblem) -> Sequence[TmaTile]:
    """The tiles of `PROMISING`, `DECODING` or `INT4` that fit a layer, with as many stages as fit."""
    if not in_rows(problem):
        return []
    promising = INT4 if problem.scheme.weight.bits == 4 else DECODING if decodes(problem) else PROMISING
    sweeps = problem.local_experts > MOST_WITHOUT_SWEEPS
    tiles = (
        _with_stages(problem, tile)
        for tile in promising
        if not (sweeps and tile.turned and tile.group_m == 1)
    )
    return [tile for tile in tiles if tile is not None]


FEW_FOR_FAST_SUMS = 100
"""Tokens per expert up to which FP8 sums are added in fp32, which costs little there."""

FEW_FOR_TURNED = 48
"""Tokens per expert up to which turned products, of 64 tokens each, are mostly of none."""


def suits(problem: MoEProblem, tile: TmaTile, tokens_per_expert: float) -> bool:
    """Neither do most experts need several tiles where one could do, nor are tiles mostly empty."""
    widest = min(128, most_decoding(problem)) if decodes(problem) else 128
    if tile.fast_sums and tokens_per_expert <= FEW_FOR_FAST_SUMS:
        return False
    if tile.turned and tokens_per_expert <= FEW_FOR_TURNED:
        return False
    return 0.7 * min(tokens_per_expert, widest) <= tile.tokens <= max(16, 8 * tokens_per_expert)


def launch_shape(problem: MoEProblem, tile: TmaTile) -> LaunchShape:
    """The tile in the terms of the model of time: a piece of 128 bytes has 64 columns of 16 bits, or 128.

    Names begin with what is multiplied, by which coefficients are fitted (`fitted_family`).
    """
    weight = problem.scheme.weight
    words = [word for word in tile_words(tile).split() if not word.startswith("stages=")]
    name = "tma fp8 a16" if weight.name == "fp8" and decodes(problem) else f"tma {weight.name}"
    kind = " ".join([name, *(word for word in words if not word.startswith("group_m="))])
    step = tile.depth * 16 // weight.bits
    first, second = (GemmShape(f"{kind} {stage}", tile.rows, step) for stage in ("first", "second"))
    return LaunchShape(
        " ".join([name, *words]),
        (first, second),
        tile.widths,
        persistent=tile.programs,
        lists=True,
        codes=0 if token_format(problem) is None else 1 if tile.quantizes else 2,
    )


def small_binaries(problem: MoEProblem) -> int:
    """Compiled kernels of a layer beside its GEMMs: one lists assignments, one adds up, others quantize."""
    return 2 + quantizing_binaries(problem)


TMA_TILES = TileFamily(
    TmaTile,
    refusal,
    capability=((9, 0), (9, 0)),
    candidates=candidates,
    suits=suits,
    small_binaries=small_binaries,
    shape=launch_shape,
)
