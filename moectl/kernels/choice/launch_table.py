"""The table of measured launches that ships with the package (``launches.json``), and its lookup.

An entry is one layer on one GPU, measured by ``scripts/tune_kernels``; its rows are the fastest kernel
family and tile at a number of tokens. A layer takes what the model of time predicts, and of its own rows
(`own_rows`) as many as share few compiled kernels (``launch_plan``). Where the model does not know the
format or the GPU, it takes the nearest row of a GPU of the same capability (`nearest`), by weight format,
sizes, number of active experts and tokens per expert. Launches that `moectl tune` measured for the same
layer on the same machine come first (`tuned`).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from operator import itemgetter
from typing import Any

from ...cache.cache_file import CacheWarning
from ...cache.launches_file import rows_of
from ...capabilities.own_kernels import ROW_FORMATS
from ...environment import Device
from ...problem.moe_problem import MoEProblem
from ...problem.number_formats import number_format

FILE = "launches.json"
VERSION = 2
"""Raised when a field of `FILE` is renamed or changes its meaning."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """The properties of a GPU that determine a launch: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    sms: int


@dataclass(frozen=True, slots=True)
class TokenSpread:
    """How tokens are distributed over experts when each token takes `top_k` of `experts` at random.

    Attributes:
        active_experts: expected number of active experts (with at least one token).
        tokens_per_expert: average number of tokens per active expert.
    """

    active_experts: float
    tokens_per_expert: float

    @staticmethod
    def of(experts: int, top_k: int, tokens: int) -> TokenSpread:
        """The spread of `tokens` tokens, one or more."""
        share = min(top_k, experts) / experts
        active = experts * -math.expm1(tokens * math.log1p(-share)) if share < 1 else float(experts)
        return TokenSpread(active, tokens * top_k / active)

    @staticmethod
    def local(problem: MoEProblem, tokens: int) -> TokenSpread:
        """The spread over the experts of one rank, which has its share of the active experts."""
        layer = TokenSpread.of(problem.experts, problem.top_k, tokens)
        return TokenSpread(
            layer.active_experts * problem.local_experts / problem.experts, layer.tokens_per_expert
        )


@dataclass(frozen=True, slots=True)
class MeasuredLaunch:
    """The fastest launch of a layer at one number of tokens: kernel family and fields of its tile."""

    tokens: int
    spread: TokenSpread
    family: str
    tile: Mapping[str, int]
    us: float


@dataclass(frozen=True, slots=True)
class LayerLaunches:
    """The fastest launches of one layer on one GPU."""

    gpu: GpuModel
    weight: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    rows: tuple[MeasuredLaunch, ...]

    def distance(self, problem: MoEProblem) -> float:
        """Distance of the measured layer from `problem`, 0 for the same layer.

        Numbers of tokens are compared by `_by_distance`.
        """
        dims, weight = problem.dims, problem.scheme.weight
        measured = number_format(self.weight.partition(" ")[0])
        similar = 1.0 if measured.name == weight.name else 1.5 if measured.grid == weight.number.grid else 3.0
        formats = 0.0 if self.weight == str(weight) else similar
        sizes = math.log2(self.hidden / dims.hidden), math.log2(self.intermediate / dims.intermediate)
        routing = math.log2(self.experts / problem.local_experts), math.log2(self.top_k / problem.top_k)
        return formats + 0.5 * sum(map(abs, sizes)) + 0.1 * sum(map(abs, routing))


@cache
def entries() -> tuple[LayerLaunches, ...]:
    """The measured layers that ship with the package."""
    data = json.loads((files(__package__) / FILE).read_text("utf-8"))
    if data["version"] != VERSION:
        raise ValueError(f"{FILE} has version {data['version']}, expected {VERSION}")
    return tuple(_entry(item) for item in data["layers"])


def _entry(item: Mapping[str, Any]) -> LayerLaunches:
    experts, top_k = item["experts"], item["top_k"]
    rows = tuple(
        MeasuredLaunch(tokens, TokenSpread.of(experts, top_k, tokens), row["family"], row["tile"], row["us"])
        for row in item["rows"]
        for tokens in [row["tokens"]]
    )
    major, minor = item["capability"]
    gpu = GpuModel((major, minor), item["sms"])
    sizes = (item["hidden"], item["intermediate"], experts, top_k)
    return LayerLaunches(gpu, item["weight"], *sizes, rows)


MAX_CACHE_DISTANCE = 0.5
"""Maximum distance, in powers of two of the number of tokens, at which a row of the user's cache is used."""


def tuned(problem: MoEProblem, tokens: int, device: Device) -> Iterator[MeasuredLaunch]:
    """Launches that `moectl tune` measured for this layer near `tokens` tokens on `device`, nearest first.

    A cache file that cannot be used is ignored, with one `CacheWarning`.
    """
    rows, note = rows_of(problem, device)
    if note:
        warnings.warn(note, CacheWarning, stacklevel=2)
    distances = {row.tokens: abs(math.log2(row.tokens / tokens)) for row in rows}
    for row in sorted(rows, key=lambda row: distances[row.tokens]):
        if distances[row.tokens] <= MAX_CACHE_DISTANCE:
            spread = TokenSpread.local(problem, row.tokens)
            yield MeasuredLaunch(row.tokens, spread, row.family, row.tile, row.us)


def own_rows(problem: MoEProblem, gpu: GpuModel) -> tuple[MeasuredLaunch, ...]:
    """Shipped launches of this very layer on GPUs of this model.

    Rows are of whole layers: a rank's share of the experts gets fewer assignments than a layer of so many.
    """
    if problem.local_experts != problem.experts:
        return ()
    found = (entry.rows for entry in entries() if entry.gpu == gpu and not entry.distance(problem))
    return tuple(row for rows in found for row in rows)


def nearest(problem: MoEProblem, tokens: int, gpu: GpuModel) -> Iterator[MeasuredLaunch]:
    """Shipped launches for `tokens` tokens of `problem`, nearest first.

    Only GPUs of the same compute capability are included, at a distance by their number of multiprocessors.
    """
    yield from (row for _, row in _by_distance(problem, tokens, gpu))


def distance_to_nearest(problem: MoEProblem, tokens: int, gpu: GpuModel) -> float:
    """Distance to the first launch of `nearest`, roughly in powers of two.

    0 for a measured case, infinite for other compute capabilities.
    """
    return next((distance for distance, _ in _by_distance(problem, tokens, gpu)), math.inf)


LAYER_WEIGHT = 4.0
"""Weight of the distance between layers relative to that between numbers of tokens. With it, 22 cases of
other layers were 1.3% slower on an H200 than with the better of two rows each; with all rows of the nearest
layer first, 3.7%."""


def _same_storage(weight: str, problem: MoEProblem) -> bool:
    """Whether launches for a measured weight format suit a layer's: both in tiles, or the same in rows."""
    name, other = weight.partition(" ")[0], problem.scheme.weight.name
    return name == other if {name, other} & {*ROW_FORMATS} else True


def _by_distance(problem: MoEProblem, tokens: int, gpu: GpuModel) -> list[tuple[float, MeasuredLaunch]]:
    """(distance, row) for every row of a GPU with this compute capability, nearest first.

    Numbers of tokens are compared in powers of two; active experts, which affect occupancy only, have half
    the weight.
    """
    spread, log2 = TokenSpread.local(problem, tokens), math.log2
    active, per_expert = spread.active_experts, spread.tokens_per_expert
    rows = [
        (layer + (abs(log2(row_per_expert / per_expert)) + 0.5 * abs(log2(row_active / active))), row)
        for layer, row_per_expert, row_active, row in _rows_of(problem, gpu)
    ]
    rows.sort(key=itemgetter(0))
    return rows


@lru_cache(maxsize=64)
def _rows_of(problem: MoEProblem, gpu: GpuModel) -> tuple[tuple[float, float, float, MeasuredLaunch], ...]:
    """The rows of `_by_distance`, each after what does not depend on the number of tokens.

    That is the weighted distance of its layer and GPU, its tokens per expert and its active experts.
    """
    return tuple(
        (
            LAYER_WEIGHT * (entry.distance(problem) + abs(math.log2(entry.gpu.sms / gpu.sms))),
            row.spread.tokens_per_expert,
            row.spread.active_experts,
            row,
        )
        for entry in entries()
        if entry.gpu.capability == gpu.capability and _same_storage(entry.weight, problem)
        for row in entry.rows
    )
