"""A model of the time of a launch: which launch a layer takes that was not measured.

A GEMM takes the longest of three times, smoothly: that of reading its active experts' weights, that of the
instructions and matrix products of its programs, and that of waiting for memory where few programs run.
Terms (`terms`) follow from sizes, routing and the launch's shape; coefficients, ``launch_model.json``, are
fitted to measured launches (``scripts/fit_launch_model``, docs/launches.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from ...problem.moe_problem import MoEProblem
from ...problem.schemes import WeightFormat
from .launch_shape import LaunchShape
from .launches import token_tiles

FILE = "launch_model.json"

CLOCK = 1.75e9
"""Clocks per second that coefficients in clocks refer to."""

POINTS = 48
"""Numbers of tokens of an expert over which expectations are taken."""

LAUNCH = ("fixed", "resident", "combine", "sharpness", "rounding", "copying", "idle")
"""Coefficients of a launch: seconds of all small kernels, programs per multiprocessor by registers, bytes per
second of the final sum, how sharply the longest time wins, how much of a last round of programs is waited
for, clocks to copy 64 columns of one token, and clocks of a multiprocessor for a program without work."""

GEMM = ("bandwidth", "tile", "token", "program", "latency", "start")
"""Coefficients of a GEMM: share of the memory's bandwidth, clocks of a 64x64 tile of weights and, for each
token of the tile, more, clocks of a program, of a step and of the first one."""

BY_FORMAT = ("bandwidth", "tile", "token")
"""Coefficients that have a factor for each weight format."""


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What the time depends on: number of multiprocessors, and published bandwidth in bytes per second."""

    sms: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class GemmTerms:
    """One GEMM's part of the work, broadcastable to ``[numbers of tokens, launches]``.

    Attributes:
        bytes: weights and scales of the active experts.
        programs: (token tile, row tile) pairs, times the split.
        tiles: 64x64 tiles of weights in one.
        steps: of its loop.
        width: average tokens of a token tile.
        resident: programs per multiprocessor by shared memory.
        copied: 64-column pieces of tokens that a program copies first.
        idle: programs that find no work, as grids are for the most tiles that a routing can need.
    """

    bytes: Tensor
    programs: Tensor
    tiles: Tensor
    steps: Tensor
    width: Tensor
    resident: Tensor
    copied: Tensor
    idle: Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """A layer's work under launches, for numbers of tokens.

    Attributes:
        gemms: the first and the second GEMM.
        rows: bytes of rows between and after the GEMMs.
        persistent: `LaunchShape.persistent`.
    """

    gemms: tuple[GemmTerms, GemmTerms]
    rows: Tensor
    persistent: Tensor


Coefficient = Callable[[str, int], Tensor]
"""The value of a coefficient, by its name and the index of the GEMM."""


def expert_counts(experts: int, top_k: int, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Numbers of tokens that an expert may get, and their probabilities, both ``[len(tokens), POINTS]``.

    Each token takes `top_k` of `experts` at random: a binomial distribution, sampled where it is wide. The
    number 0 is left out.
    """
    share = min(top_k, experts) / experts
    m = torch.tensor(tokens, dtype=torch.float64)[:, None]
    if share >= 1:
        points = torch.zeros(len(m), POINTS, dtype=torch.float64)
        points[:, 0] = 1
        return m.expand(-1, POINTS), points
    mean, deviation = m * share, (m * share * (1 - share)).sqrt()
    index = torch.arange(POINTS, dtype=torch.float64)
    wide = mean + 5 * deviation > POINTS
    sampled = mean + deviation * (index / (POINTS - 1) * 8 - 4)
    counts = torch.where(wide, sampled.round().clamp(min=0), 1 + index)
    normal = torch.exp(-(((sampled - mean) / deviation) ** 2) / 2)
    choose = torch.lgamma(m + 1) - torch.lgamma(counts + 1) - torch.lgamma((m - counts).clamp(min=0) + 1)
    binomial = torch.exp(choose + counts * math.log(share) + (m - counts) * math.log1p(-share))
    binomial = torch.where(counts <= m, binomial, 0.0)
    return counts, torch.where(wide, (normal / normal.sum(1, keepdim=True)) * (counts > 0), binomial)


def _token_tiles(counts: Tensor, shape: LaunchShape) -> tuple[Tensor, Tensor]:
    """Token tiles of an expert with `counts` tokens, and the sum of their widths."""
    if not shape.widths:
        return counts, counts
    widths = torch.tensor(shape.widths, dtype=torch.float64)
    most = shape.widths[-1]
    tiles = torch.ceil(counts / most)
    if shape.even:
        each = torch.ceil(torch.ceil(counts / 16) / tiles.clamp(min=1)) * 16
        return tiles, tiles * widths[torch.searchsorted(widths, each).clamp(max=len(widths) - 1)]
    rest = counts - (tiles - 1).clamp(min=0) * most
    last = widths[torch.searchsorted(widths, rest.contiguous()).clamp(max=len(widths) - 1)]
    return tiles, torch.where(counts > 0, (tiles - 1) * most + last, 0.0)


def _most_tiles(problem: MoEProblem, tokens: int, shape: LaunchShape) -> int:
    """Token tiles that a grid is for; 0 for programs that stay and take tiles as there are."""
    if shape.persistent:
        return 0
    assignments = tokens * problem.top_k
    return token_tiles(assignments, problem.local_experts, shape.widths[-1]) if shape.widths else assignments


def terms(problem: MoEProblem, tokens: Sequence[int], shapes: Sequence[LaunchShape]) -> Terms:
    """The work of `problem` for each of `tokens` under each launch, ``[len(tokens), len(shapes)]``."""
    counts, chances = expert_counts(problem.experts, problem.top_k, tokens)
    local, dims = problem.local_experts, problem.dims
    active = local * (chances * (counts > 0)).sum(1, keepdim=True)
    split: dict[tuple[tuple[int, ...], bool], tuple[Tensor, Tensor]] = {}
    for shape in shapes:
        key = shape.widths, shape.even
        if key not in split:
            each, wide = _token_tiles(counts, shape)
            split[key] = local * (chances * each).sum(1), local * (chances * wide).sum(1)
    tiles = torch.stack([split[s.widths, s.even][0] for s in shapes], 1)
    width = torch.stack([split[s.widths, s.even][1] for s in shapes], 1) / tiles.clamp(min=1e-9)
    idle = torch.tensor([[_most_tiles(problem, m, s) for s in shapes] for m in tokens], dtype=torch.float64)
    idle = (idle - tiles).clamp(min=0)
    assignments = torch.tensor(tokens, dtype=torch.float64) * problem.top_k * local / problem.experts
    gated = 2 if problem.activation.gated else 1
    sizes = (gated * dims.intermediate, dims.hidden), (dims.hidden, dims.intermediate)
    gemms = []
    for index, (n, k) in enumerate(sizes):
        of = [shape.gemms[index] for shape in shapes]
        columns = math.ceil(k / 64)

        def row(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)[None]

        gemms.append(
            GemmTerms(
                bytes=active * float(problem.scheme.weight.nbytes(n, k)),
                programs=tiles * row([math.ceil(n / g.rows) * g.split for g in of]),
                tiles=row([g.rows / 64 * columns / g.split for g in of]),
                steps=row([math.ceil(columns / g.split / g.step) for g in of]),
                width=width,
                resident=row([g.resident for g in of]),
                copied=row([g.copied * columns / g.split for g in of]),
                idle=idle * row([math.ceil(n / g.rows) * g.split for g in of]),
            )
        )
    rows = (assignments * 4 * (dims.hidden + dims.intermediate))[:, None]
    persistent = torch.tensor([float(s.persistent) for s in shapes], dtype=torch.float64)[None]
    return Terms((gemms[0], gemms[1]), rows, persistent)


def seconds(work: Terms, gpu: GpuRates | tuple[Tensor, Tensor], of: Coefficient) -> Tensor:
    """Seconds of the layer under each launch.

    Args:
        work: from `terms`.
        gpu: or tensors of multiprocessors and bandwidths that broadcast to the terms.
        of: the coefficients.
    """
    sms, bandwidth = (gpu.sms, gpu.bandwidth) if isinstance(gpu, GpuRates) else gpu
    total = of("fixed", 0) + work.rows / of("combine", 0)
    sharpness, rounding = 1.5 + of("sharpness", 0), of("rounding", 0)
    rounding = rounding / (1 + rounding)
    stays = work.persistent > 0
    for index, gemm in enumerate(work.gemms):
        memory = gemm.bytes / (bandwidth * of("bandwidth", index).clamp(max=1.0))
        resident = torch.where(stays, work.persistent, torch.minimum(gemm.resident, of("resident", 0)))
        rounds = (gemm.programs / (sms * resident)).clamp(min=1e-6)
        whole = torch.where(stays, torch.ceil(rounds - 0.02), rounds + 0.5 * torch.exp(-rounds)).clamp(
            min=1.0
        )
        waited = rounding * whole + (1 - rounding) * rounds.clamp(min=1.0)
        copying = of("copying", 0) * gemm.copied
        program = gemm.tiles * (of("tile", index) + of("token", index) * gemm.width)
        program = (program + of("program", index) + copying) / CLOCK
        issued = torch.where(stays, work.persistent * waited, (gemm.programs / sms).clamp(min=1.0)) * program
        latency = waited * (gemm.steps * of("latency", index) + of("start", index) + 2 * copying) / CLOCK
        total = total + of("idle", 0) * gemm.idle / (sms * CLOCK)
        total = total + (memory**sharpness + issued**sharpness + latency**sharpness) ** (1 / sharpness)
    return total


@dataclass(frozen=True)
class Coefficients:
    """Natural logarithms of coefficients: of families, and what is added for a shape's name and a format.

    Attributes:
        families: family -> coefficient -> value.
        shapes: name of a `GemmShape` or `LaunchShape` -> coefficient -> value to add.
        formats: family -> weight format -> coefficient -> value to add.
    """

    families: Mapping[str, Mapping[str, float]]
    shapes: Mapping[str, Mapping[str, float]]
    formats: Mapping[str, Mapping[str, Mapping[str, float]]]

    def format_for(self, family: str, weight: WeightFormat) -> str:
        """The fitted format that stands for a layer's: itself, or another group of its codes; else empty."""
        fitted = self.formats.get(family, {})
        if str(weight) in fitted:
            return str(weight)
        alike = [name for name in fitted if name.startswith(f"{weight.name} group ")]
        group = weight.group if weight.group > 0 else 128
        return min(alike, key=lambda name: abs(math.log2(int(name.split()[2]) / group)), default="")

    def value(self, name: str, index: int, family: str, shape: LaunchShape, weight: str) -> float:
        """The logarithm of a coefficient."""
        part = shape.gemms[index].name if name in GEMM else shape.name
        added = self.shapes.get(part, {}).get(name, 0.0)
        by_format = self.formats[family][weight].get(name, 0.0) if name in BY_FORMAT else 0.0
        return self.families[family][name] + added + by_format


@cache
def coefficients() -> Coefficients:
    """The coefficients that ship with the package."""
    document = json.loads((files(__package__) / FILE).read_text("utf-8"))
    return Coefficients(document["families"], document["shapes"], document["formats"])


def predicted_us(
    problem: MoEProblem,
    tokens: Sequence[int],
    launches: Sequence[tuple[str, LaunchShape]],
    gpu: GpuRates,
    known: Coefficients | None = None,
) -> Tensor:
    """Microseconds of `problem`'s layer under each launch, (family, shape), ``[len(tokens), len(launches)]``.

    Every family must be fitted for the layer's weight format (`Coefficients.format_for`).
    """
    known, weight = known or coefficients(), problem.scheme.weight
    formats = {family: known.format_for(family, weight) for family, _ in launches}

    @cache
    def of(name: str, index: int) -> Tensor:
        values = [known.value(name, index, family, shape, formats[family]) for family, shape in launches]
        return torch.tensor(values, dtype=torch.float64).exp()[None]

    return 1e6 * seconds(terms(problem, tokens, [shape for _, shape in launches]), gpu, of)
