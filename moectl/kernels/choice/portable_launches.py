"""Launches of the portable kernel families `decode` and `grouped`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...capabilities.own_kernels import ROW_FORMATS, in_rows, token_format
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FP8_BLOCK
from .launch_shape import GemmShape, LaunchShape
from .tile_family import DECODED, TileFamily, programs_by_registers, quantizing_binaries


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch configuration.

    Attributes:
        tokens, rows, depth: tile size: tokens x weight rows x columns per step of the reduction.
        stages: number of load pipeline stages.
        warps: per program; a warp may own several 16-row blocks of the tile.
        split: split-K of the second GEMM (decode only).
        tails: how many times an expert's partial last tile may be halved (grouped only).
    """

    tokens: int
    rows: int
    depth: int
    stages: int
    warps: int
    split: int = 1
    tails: int = 0


FORMATS = (*DECODED, *ROW_FORMATS)
"""Names of the weight formats that the portable kernels read."""

DECODE_ASSIGNMENTS = 64
"""Most assignments of a layer's decode launches, whose programs read all ids each: for more, one sort is
cheaper. Up to so many share a compiled form."""

DECODE: tuple[Tile, ...] = (
    Tile(16, 64, 128, stages=5, warps=4, split=4),
    Tile(16, 64, 128, stages=5, warps=4),
    Tile(16, 128, 128, stages=4, warps=4, split=2),
    Tile(16, 128, 64, stages=5, warps=4),
    Tile(16, 256, 64, stages=4, warps=4),
)
"""Tiles of the decode kernels: few tokens need more programs, more tokens more rows per warp, and with them
fewer instructions per weight."""

GROUPED: tuple[Tile, ...] = (
    Tile(16, 64, 128, stages=4, warps=4),
    Tile(16, 128, 64, stages=5, warps=4),
    Tile(16, 256, 64, stages=4, warps=4),
    Tile(32, 128, 64, stages=5, warps=4, tails=1),
    Tile(64, 128, 64, stages=4, warps=8, tails=2),
    Tile(64, 256, 64, stages=4, warps=8, tails=2),
    Tile(128, 128, 64, stages=4, warps=8, tails=2),
)
"""Tiles of the grouped kernels."""

GROUPED_TWO_SUMS = GROUPED[:-2]
"""`GROUPED` for layers whose kernels need two accumulators, as E8M0 scales exceed fp16's range and multiply
sums of groups: tiles that do not spill registers."""

ROWS_DECODE: tuple[Tile, ...] = (
    Tile(16, 64, 128, stages=4, warps=4, split=4),
    Tile(16, 64, 128, stages=4, warps=4, split=2),
    Tile(16, 64, 128, stages=4, warps=4),
    Tile(16, 128, 64, stages=4, warps=4),
)
"""`DECODE` for weights in rows, whose tiles in shared memory take up to 96 KiB, which every GPU from SM80 on
has."""

ROWS_GROUPED: tuple[Tile, ...] = (
    Tile(16, 64, 128, stages=4, warps=4),
    Tile(16, 128, 64, stages=4, warps=4),
    Tile(32, 128, 64, stages=4, warps=4),
    Tile(64, 128, 64, stages=4, warps=4, tails=2),
    Tile(64, 128, 64, stages=4, warps=8, tails=2),
    Tile(128, 128, 64, stages=3, warps=8, tails=2),
)
"""`GROUPED` for 16-bit weights in rows."""

FP8_GROUPED: tuple[Tile, ...] = (
    Tile(16, 64, 128, stages=4, warps=4),
    Tile(32, 64, 128, stages=4, warps=4),
    Tile(64, 128, 128, stages=3, warps=8, tails=2),
)
"""`GROUPED` for FP8 weights, and for integers in rows, which were not measured. Sums of 128 columns take
registers of their own, but not those of INT8."""

FP8_GROUPED_A16: tuple[Tile, ...] = (
    *FP8_GROUPED[:2],
    Tile(64, 128, 64, stages=4, warps=8, tails=2),
)
"""`FP8_GROUPED` for 16-bit tokens: codes are decoded in registers."""


def _decode_candidates(problem: MoEProblem) -> Sequence[Tile]:
    return ROWS_DECODE if in_rows(problem) else DECODE


def _grouped_candidates(problem: MoEProblem) -> Sequence[Tile]:
    if in_rows(problem):
        if problem.scheme.weight.bits == 16:
            return ROWS_GROUPED
        return FP8_GROUPED if token_format(problem) else FP8_GROUPED_A16
    scales = problem.scheme.weight.number.scale
    return GROUPED_TWO_SUMS if scales == "E8M0" and problem.dtype == "fp16" else GROUPED


def _has_sums_of_steps(problem: MoEProblem) -> bool:
    """Whether products of a step are summed by themselves, and then scaled or added in fp32."""
    weight = problem.scheme.weight
    return weight.name == "fp8" or (in_rows(problem) and weight.bits == 4)


def _fits(problem: MoEProblem, tile: Tile) -> str:
    weight = problem.scheme.weight
    if weight.name not in FORMATS:
        return f"it supports {', '.join(FORMATS)}; the layer has {weight}"
    columns = FP8_BLOCK.block[1]
    if _has_sums_of_steps(problem) and tile.depth > columns:
        return f"{tile} adds up more than {columns} columns of {weight.name.upper()} products at once"
    whole_tiles = tile.rows % 64 == 0 and tile.depth % 64 == 0
    group = weight.group
    whole_groups = group == 0 or tile.depth % group == 0 or group % tile.depth == 0
    enough = tile.tokens >> tile.tails >= 16 and tile.rows >= 16 * tile.warps and tile.split >= 1
    if whole_tiles and whole_groups and enough:
        return ""
    return f"{tile} does not consist of whole weight tiles and groups of {group}"


MOST_REGISTERS = 255
"""Registers that a thread can have."""


def _gemm(problem: MoEProblem, tile: Tile, family: str, split: int = 1) -> GemmShape:
    """One of the two GEMMs in the terms of the model of time.

    A program holds its sums, a step's weights in 16 bits (or sums of steps), and some 40 other numbers in
    registers, and in shared memory as many steps of weights and tokens as there are stages. On SM90 most
    compiled kernels are within a fifth of that; elsewhere most take a stage less, and a few twice as much.
    """
    weight, threads = problem.scheme.weight, 32 * tile.warps
    sums = tile.rows * tile.tokens / threads
    decoded = 0.0 if in_rows(problem) else tile.rows * tile.depth / 2 / threads
    if _has_sums_of_steps(problem):
        sums *= 4
    registers = min(MOST_REGISTERS, int(40 + sums + decoded))
    act_bits = 8 if token_format(problem) else 16
    stage = tile.depth * (tile.rows * weight.bits + tile.tokens * act_bits) // 8
    return GemmShape(
        f"{family} {_form(problem)}{tile.tokens}x{tile.rows}x{tile.depth} {tile.warps}",
        tile.rows,
        tile.depth // 64,
        split,
        programs_by_registers(registers, tile.warps),
        shared=tile.stages * stage,
    )


def _form(problem: MoEProblem) -> str:
    """What code of its own the products have, for the names of coefficients: empty for weights in tiles."""
    if not in_rows(problem):
        return ""
    tokens = "" if token_format(problem) or problem.scheme.weight.bits == 16 else "a16 "
    return f"{_multiplied(problem)} {tokens}"


def _multiplied(problem: MoEProblem) -> str:
    """What weights in rows are multiplied like: integers were not measured."""
    return problem.scheme.weight.name if problem.scheme.weight.bits == 16 else "fp8"


def _kernels(problem: MoEProblem, family: str) -> str:
    """The name of a launch's coefficients."""
    return f"{family} {_multiplied(problem)}" if in_rows(problem) else family


def _quantized(problem: MoEProblem) -> int:
    """GEMMs whose input is quantized: both or none."""
    return 0 if token_format(problem) is None else 2


def _decode_shape(problem: MoEProblem, tile: Tile) -> LaunchShape:
    first, second = (_gemm(problem, tile, "decode", split) for split in (1, tile.split))
    return LaunchShape(
        _kernels(problem, "decode"), (first, second), (tile.tokens,), codes=_quantized(problem)
    )


def _grouped_shape(problem: MoEProblem, tile: Tile) -> LaunchShape:
    gemm = _gemm(problem, tile, "grouped")
    widths = tuple(tile.tokens >> halved for halved in range(tile.tails, -1, -1))
    return LaunchShape(_kernels(problem, "grouped"), (gemm, gemm), widths, codes=_quantized(problem))


def _small_binaries(problem: MoEProblem) -> int:
    """One lists assignments, two add up, others quantize."""
    return 3 + quantizing_binaries(problem)


DECODE_TILES = TileFamily(
    Tile,
    _fits,
    candidates=_decode_candidates,
    tokens_per_expert=(0, 16),
    most_assignments=DECODE_ASSIGNMENTS,
    narrowest=16,
    small_binaries=_small_binaries,
    shape=_decode_shape,
)
GROUPED_TILES = TileFamily(
    Tile, _fits, candidates=_grouped_candidates, small_binaries=_small_binaries, shape=_grouped_shape
)
