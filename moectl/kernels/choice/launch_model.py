"""A model of the time of a launch: which launch a layer takes that was not measured.

A GEMM takes the longest of three times, smoothly: that of reading its active experts' weights, that of the
instructions and matrix products of its programs, and that of waiting for memory where few programs run.
Its work (`work_of`) follows from sizes, routing and the launch's shape; coefficients, ``launch_model.json``,
are fitted to measured launches (``scripts/fit_launch_model``, docs/launches.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import takewhile
from typing import Any, NamedTuple

from ...environment.named_devices import lowest_matrix_rate, published_matrix_rate
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, WeightFormat
from .expert_load import ExpertLoad
from .launch import list_launches, token_tiles
from .launch_shape import GemmShape, LaunchShape
from .tile_family import RESERVED, SHARED_KIB, SHARED_MEMORY

FILE = "launch_model.json"

CLOCK = 1.75e9
"""Clocks per second that coefficients in clocks refer to."""

Quantity = Any
"""A number, or a tensor of numbers: the fit has those of all rows at once."""


FITTED_MATRIX_RATE = 7.495e12
"""Published dense 16-bit matrix rate of a multiprocessor of the GPUs that were measured, FLOP/s."""


FITTED_CAPABILITY = (9, 0)
"""The GPUs on which the launches were measured that the model of time is fitted to."""

LEAST_SHARED_KIB = min(SHARED_KIB.values())
"""KiB of shared memory of a program that every GPU has."""

USUAL_BANDWIDTH = 3.35e12
"""Bytes per second of a GPU that says nothing of its memory: an H100's."""


class GpuRates(NamedTuple):
    """What the time depends on.

    Attributes:
        sms: number of multiprocessors.
        bandwidth: published bytes per second.
        matrix: matrix rate of a multiprocessor, as a share of `FITTED_MATRIX_RATE`.
        shared: most bytes of shared memory of a program.
    """

    sms: Quantity
    bandwidth: Quantity
    matrix: Quantity = 1.0
    shared: Quantity = SHARED_MEMORY

    @staticmethod
    def of(
        sms: int, bandwidth: float, flops_per_sm: float, capability: tuple[int, int] = FITTED_CAPABILITY
    ) -> GpuRates:
        """The rates of a GPU.

        Args:
            sms: number of multiprocessors.
            bandwidth: published bytes per second.
            flops_per_sm: published matrix rate of a multiprocessor, FLOP/s; `FITTED_MATRIX_RATE` stands for a
                higher one, and for 0, an unknown one.
            capability: its compute capability, of which the shared memory follows.
        """
        matrix = min(1.0, flops_per_sm / FITTED_MATRIX_RATE) or 1.0
        major, minor = capability
        return GpuRates(sms, bandwidth, matrix, SHARED_KIB.get(10 * major + minor, LEAST_SHARED_KIB) << 10)

    @staticmethod
    def of_gpu(name: str, sms: int, bandwidth: float, capability: tuple[int, int]) -> GpuRates:
        """The rates of the GPU with a name, whose matrix rate is looked up.

        One that is not published is the lowest of its architecture; of that which was measured, the measured
        GPUs'.

        Example:
            >>> GpuRates.of_gpu("NVIDIA A10G", 80, 6e11, (8, 6)).matrix < 0.12
            True
        """
        rate = published_matrix_rate(name)
        if not rate and capability != FITTED_CAPABILITY:
            rate = lowest_matrix_rate(10 * capability[0] + capability[1])
        return GpuRates.of(sms, bandwidth, rate, capability)


class GemmWork(NamedTuple):
    """One GEMM's part of the work.

    Attributes:
        bytes: weights and scales of the active experts.
        again: those that further token tiles of an expert read again.
        programs: (token tile, row tile) pairs, times the split.
        tiles: 64x64 tiles of weights that one computes, in whole steps.
        steps: of its loop.
        width: average tokens of a token tile.
        resident: programs that fit into one multiprocessor, if not for shared memory.
        shared: bytes of a multiprocessor's shared memory that one takes.
        copied: 64-column pieces of tokens that a program copies first.
        idle: programs that find no work, as grids are for the most tiles that a routing can need.
    """

    bytes: Quantity
    again: Quantity
    programs: Quantity
    tiles: Quantity
    steps: Quantity
    width: Quantity
    resident: Quantity
    shared: Quantity
    copied: Quantity
    idle: Quantity


class LaunchWork(NamedTuple):
    """A layer's work under a launch, for a number of tokens.

    Attributes:
        gemms: the first and the second GEMM.
        rows: bytes of rows between and after the GEMMs.
        lists: launches that list the assignments, if they are counted.
        persistent: `LaunchShape.persistent`.
        busy: probability that there is any work for the GEMMs.
    """

    gemms: tuple[GemmWork, GemmWork]
    rows: Quantity
    lists: Quantity
    persistent: Quantity
    busy: Quantity


class GemmCoefficients(NamedTuple):
    """Coefficients of a GEMM.

    Attributes:
        bandwidth: share of the memory's bandwidth, at most 1.
        tile: clocks of a 64x64 tile of weights.
        token: more of them for each token of the token tile, at `FITTED_MATRIX_RATE`.
        program, latency, start: clocks of a program, of a step, and of the first one.
    """

    bandwidth: Quantity
    tile: Quantity
    token: Quantity
    program: Quantity
    latency: Quantity
    start: Quantity


class LaunchCoefficients(NamedTuple):
    """Coefficients of a launch.

    Attributes:
        gemms: those of the first and of the second GEMM.
        fixed: seconds of all small kernels.
        listing: seconds of a launch that lists assignments, if they are counted.
        combine: bytes per second of the final sum.
        sharpness: how sharply the longest time wins.
        rounding: how much of a last round of programs is waited for.
        uneven: how much the multiprocessors that have a program more than others are waited for.
        copying: clocks to copy 64 columns of one token.
        again: cost of a byte that is read again, mostly from L2, in bytes of memory.
        idle: clocks of a multiprocessor for a program without work.
    """

    gemms: tuple[GemmCoefficients, GemmCoefficients]
    fixed: Quantity
    listing: Quantity
    combine: Quantity
    sharpness: Quantity
    rounding: Quantity
    uneven: Quantity
    copying: Quantity
    again: Quantity
    idle: Quantity


LAUNCH, GEMM = LaunchCoefficients._fields[1:], GemmCoefficients._fields
BY_FORMAT = ("bandwidth", "tile", "token", "program", "latency", "start")
"""Coefficients that have a factor for each weight format."""


class Arithmetic(NamedTuple):
    """What `seconds` computes with besides operators: functions of numbers, or of tensors."""

    least: Callable[[Quantity, Quantity], Quantity]
    most: Callable[[Quantity, Quantity], Quantity]
    exp: Callable[[Quantity], Quantity]
    ceil: Callable[[Quantity], Quantity]
    floor: Callable[[Quantity], Quantity]
    where: Callable[[Quantity, Quantity, Quantity], Quantity]


NUMBERS = Arithmetic(
    min, max, math.exp, math.ceil, math.floor, lambda condition, yes, no: yes if condition else no
)


class LayerLoad(NamedTuple):
    """A layer's work for a number of tokens, as far as it does not depend on the launch.

    Attributes:
        problem: the layer, a rank's share.
        tokens: the number of tokens.
        experts: the load of the rank's experts.
        matrices: rows, columns and bytes of one expert's first and second matrix.
    """

    problem: MoEProblem
    tokens: int
    experts: ExpertLoad
    matrices: tuple[tuple[int, int, int], tuple[int, int, int]]

    @property
    def assignments(self) -> float:
        """Those to the rank's experts, on average."""
        problem = self.problem
        return self.tokens * problem.top_k * problem.local_experts / problem.experts


def load_of(problem: MoEProblem, tokens: int) -> LayerLoad:
    """The work of `problem` for `tokens` tokens under any launch."""
    dims, nbytes = problem.dims, problem.scheme.weight.nbytes
    rows = (2 if problem.activation.gated else 1) * dims.intermediate
    first = rows, dims.hidden, int(nbytes(rows, dims.hidden))
    second = dims.hidden, dims.intermediate, int(nbytes(dims.hidden, dims.intermediate))
    experts = ExpertLoad(problem.experts, problem.local_experts, problem.top_k, tokens)
    return LayerLoad(problem, tokens, experts, (first, second))


def work_of(load: LayerLoad, shape: LaunchShape) -> LaunchWork:
    """The work of a layer under a launch."""
    problem, assignments = load.problem, load.tokens * load.problem.top_k
    tiles, width = load.experts.tiles(shape.widths, shape.even)
    active, idle = load.experts.active, 0.0
    if not shape.persistent:  # others stay and take tiles as there are
        local = problem.local_experts
        most = token_tiles(assignments, local, shape.widths[-1]) if shape.widths else assignments
        idle = max(0.0, most - tiles)
    again = max(0.0, tiles - active)
    first, second = (
        _gemm_work(n, k, nbytes * active, nbytes * again, gemm, tiles, width, idle)
        for (n, k, nbytes), gemm in zip(load.matrices, shape.gemms, strict=True)
    )
    sizes = problem.dims.hidden + problem.dims.intermediate
    rows = load.assignments * 4 * sizes
    split = shape.gemms[1].split
    if split > 1:  # parts of four bytes each are written and read, instead of one of two
        rows += load.assignments * problem.dims.hidden * (8 * split - 4)
    quantized = load.tokens * problem.dims.hidden, load.assignments * problem.dims.intermediate
    rows += 3 * sum(quantized[: shape.codes])  # two bytes are read and one is written
    lists = list_launches(assignments, problem.local_experts) if shape.lists and load.tokens > 1 else 0
    return LaunchWork((first, second), rows, lists, shape.persistent, load.experts.busy)


def of_busiest(work: LaunchWork, experts: float, assignments: float) -> LaunchWork:
    """The work of the rank that the others wait for, from that of a rank on average.

    Args:
        experts: its active experts, as a multiple of the average.
        assignments: the same of its assignments, in proportion to which experts have further token tiles.
    """
    gemms = []
    for gemm in work.gemms:
        read, again = gemm.bytes * experts, gemm.again * assignments
        programs = gemm.programs * (read + again) / (gemm.bytes + gemm.again)
        gemms.append(gemm._replace(bytes=read, again=again, programs=programs))
    return work._replace(gemms=(gemms[0], gemms[1]), rows=work.rows * assignments, busy=1.0)


def _gemm_work(
    n: int, k: int, nbytes: float, again: float, shape: GemmShape, tiles: float, width: float, idle: float
) -> GemmWork:
    columns, programs = -(-k // 64), -(-n // shape.rows) * shape.split
    steps = math.ceil(columns / shape.split / shape.step)
    return GemmWork(
        nbytes,
        again,
        tiles * programs,
        shape.rows / 64 * steps * shape.step,
        steps,
        width,
        shape.resident,
        shape.shared + RESERVED,
        shape.copied * columns / shape.split,
        idle * programs,
    )


def seconds(work: LaunchWork, gpu: GpuRates, of: LaunchCoefficients, by: Arithmetic = NUMBERS) -> Quantity:
    """Seconds of the layer under a launch on a GPU.

    GEMMs take what they take where they have work, on average, as often as they do.
    """
    sms, bandwidth, matrix, shared = gpu
    total = of.fixed + of.listing * work.lists + work.rows / of.combine
    sharpness = 1.5 + of.sharpness
    rounding, uneven = of.rounding / (1 + of.rounding), of.uneven / (1 + of.uneven)
    stays = work.persistent > 0
    for gemm, its in zip(work.gemms, of.gemms, strict=True):
        read, programs = (gemm.bytes + of.again * gemm.again) / work.busy, gemm.programs / work.busy
        memory = read / (bandwidth * by.least(its.bandwidth, 1.0))
        fit = by.least(gemm.resident, by.most(by.floor((shared + RESERVED) / gemm.shared), 1.0))
        resident = by.where(stays, work.persistent, fit)
        rounds = by.most(programs / (sms * resident), 1e-6)
        whole = by.where(stays, by.ceil(rounds - 0.02), rounds + 0.5 * by.exp(-rounds))
        waited = rounding * by.most(whole, 1.0) + (1 - rounding) * by.most(rounds, 1.0)
        copying = of.copying * gemm.copied
        program = gemm.tiles * (its.tile + its.token * gemm.width / matrix) + its.program + copying
        each = by.most(programs / sms, 1.0)
        most = (1 - uneven) * each + uneven * by.ceil(each - 0.02)
        at_once = by.where(stays, work.persistent * waited, most)
        issued = at_once * program / CLOCK
        latency = waited * (gemm.steps * its.latency + its.start + 2 * copying) / CLOCK
        total = total + of.idle * gemm.idle / (sms * CLOCK)
        longest = (memory**sharpness + issued**sharpness + latency**sharpness) ** (1 / sharpness)
        total = total + work.busy * longest
    return total


@dataclass(frozen=True)
class Coefficients:
    """Natural logarithms of coefficients: of families, and what is added for a shape's name and a format.

    Attributes:
        families: family (`fitted_family`) -> coefficient -> value. A family without `listing` counts the
            launches that list assignments as `fixed`.
        shapes: name of a `GemmShape` or `LaunchShape` -> coefficient -> value to add.
        formats: family -> weight format -> coefficient -> value to add.
        errors: family -> name of a GPU that was measured -> median relative error of the predicted times of
            fast launches, of layers that were left out of the fit.
    """

    families: Mapping[str, Mapping[str, float]]
    shapes: Mapping[str, Mapping[str, float]]
    formats: Mapping[str, Mapping[str, Mapping[str, float]]]
    errors: Mapping[str, Mapping[str, float]]

    def format_for(self, fitted: str, weight: WeightFormat) -> str:
        """The format of a fitted family that stands for a layer's: itself, or its codes in other groups; else
        empty.

        One scale for a tensor is as much work as one for each row. FP8 stands for integers in rows where
        portable kernels multiply these, which was not measured.
        """
        known = self.formats.get(fitted, {})
        if str(weight) in known:
            return str(weight)
        if weight.number.grid.integer and fitted.endswith(" fp8") and "fp8 per channel" in known:
            return "fp8 per channel"
        if weight.block == (FULL, FULL):
            return next((name for name in known if name == f"{weight.name} per channel"), "")
        alike = [name for name in known if name.startswith(f"{weight.name} group ")]
        group = weight.group if weight.group > 0 else 128
        nearest = min(alike, key=lambda name: abs(math.log2(int(name.split()[2]) / group)), default="")
        return nearest or next((name for name in known if name.startswith(f"{weight.name} per ")), "")

    def error(self, fitted: str, weight: WeightFormat, gpu: str) -> float | None:
        """The median error of a fitted family's times on a GPU; None if it was not measured there or in this
        format.

        How far off the times are of a format that another one stands for (`format_for`) is not known.
        """
        measured = str(weight) in self.formats.get(fitted, {})
        return self.errors.get(fitted, {}).get(gpu) if measured else None

    def of(self, fitted: str, shape: LaunchShape, weight: str) -> LaunchCoefficients:
        """The coefficients of a launch of a fitted family, for a fitted weight format."""
        own, by_format = self.families[fitted], self.formats[fitted][weight]

        def values(names: tuple[str, ...], part: str) -> list[float]:
            added = self.shapes.get(part, {})
            return [
                math.exp(
                    own.get(name, -math.inf)
                    + added.get(name, 0.0)
                    + (by_format.get(name, 0.0) if name in BY_FORMAT else 0.0)
                )
                for name in names
            ]

        first, second = (GemmCoefficients(*values(GEMM, gemm.name)) for gemm in shape.gemms)
        return LaunchCoefficients((first, second), *values(LAUNCH, shape.name))


def fitted_family(family: str, shape: LaunchShape) -> str:
    """The name of the coefficients of a kernel family's launch, such as ``tma fp8`` or ``tma fp8 a16``.

    Families that decode weights run nearly the same instructions for all formats, `tma` products of another
    rate: its shapes are named by what they multiply, then by their tile.
    """
    if family != "tma":
        return family
    return " ".join(takewhile(lambda word: "=" not in word, shape.name.split()))


@cache
def coefficients() -> Coefficients:
    """The coefficients that ship with the package."""
    return Coefficients(**json.loads((files(__package__) / FILE).read_text("utf-8")))


@lru_cache(maxsize=1 << 10)
def fitted(family: str, shape: LaunchShape, weight: WeightFormat) -> LaunchCoefficients | None:
    """The shipped coefficients of a launch; None if it was not fitted, or not in a format like `weight`."""
    known = coefficients()
    name = fitted_family(family, shape)
    format = known.format_for(name, weight) if shape.name in known.shapes else ""
    return known.of(name, shape, format) if format else None


def predicted_us(
    problem: MoEProblem,
    tokens: int,
    family: str,
    shape: LaunchShape,
    gpu: GpuRates,
    busiest: tuple[float, float] | None = None,
) -> float | None:
    """Microseconds of `problem`'s layer under a launch; None if its family or the format was not fitted.

    With expert parallelism it is an average over ranks and routings, or the time of the `busiest` rank, which
    has so many active experts and assignments.
    """
    of = fitted(family, shape, problem.scheme.weight)
    if of is None:
        return None
    load = load_of(problem, tokens)
    work = work_of(load, shape)
    if busiest is not None:
        active, assignments = busiest
        work = of_busiest(work, active / load.experts.active, assignments / load.assignments)
    return 1e6 * float(seconds(work, gpu, of))
