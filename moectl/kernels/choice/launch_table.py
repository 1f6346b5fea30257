"""The table of measured launches that ships with the package (``launches.json``), and its lookup.

An entry is one layer on one GPU, measured by ``scripts/tune_kernels``; its rows are the fastest kernel
family and tile at a number of tokens, and how much longer others take. A layer takes what the model of time
predicts, and of its own rows (`own_rows`) as many as share few compiled kernels (``launch_plan``). Launches
that `moectl tune` measured for the same layer on the same machine come first (`tuned`).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ...cache.cache_file import CacheWarning
from ...cache.launches_file import rows_of
from ...capabilities.own_kernels import act_used
from ...environment import Device
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import A16

FILE = "launches.json"
VERSION = 3
"""Raised when a field of `FILE` is renamed or changes its meaning."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """The properties of a GPU that determine a launch: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    sms: int


def tokens_per_expert(problem: MoEProblem, tokens: int) -> float:
    """Tokens of an expert that has any, on average, when each of one or more tokens takes experts at random.

    A rank with a share of the experts has fewer of them, and as many tokens for each.
    """
    experts = problem.experts
    share = min(problem.top_k, experts) / experts
    active = experts * -math.expm1(tokens * math.log1p(-share)) if share < 1 else float(experts)
    return tokens * problem.top_k / active


@dataclass(frozen=True, slots=True)
class SlowerLaunch:
    """A launch that took `ratio` times as long as the fastest one in the same run."""

    family: str
    tile: Mapping[str, int]
    ratio: float


@dataclass(frozen=True, slots=True)
class MeasuredLaunch:
    """The fastest launch of a layer at one number of tokens: kernel family and fields of its tile.

    Attributes:
        slower: others that were measured there.
    """

    tokens: int
    family: str
    tile: Mapping[str, int]
    us: float
    slower: tuple[SlowerLaunch, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerLaunches:
    """The fastest launches of one layer on one GPU.

    Attributes:
        act: what kernels quantize tokens and activations to, such as ``fp8 dynamic``; ``a16`` if to nothing.
    """

    gpu: GpuModel
    weight: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    rows: tuple[MeasuredLaunch, ...]
    act: str = str(A16)

    def is_of(self, problem: MoEProblem) -> bool:
        """Whether a layer is the one that was measured, with all of its experts."""
        sizes = problem.dims.hidden, problem.dims.intermediate, problem.experts, problem.top_k
        whole = problem.local_experts == problem.experts
        mine = self.hidden, self.intermediate, self.experts, self.top_k
        formats = str(problem.scheme.weight), act_used(problem)
        return whole and sizes == mine and formats == (self.weight, self.act)


@cache
def entries() -> tuple[LayerLaunches, ...]:
    """The measured layers that ship with the package."""
    data = json.loads((files(__package__) / FILE).read_text("utf-8"))
    if data["version"] != VERSION:
        raise ValueError(f"{FILE} has version {data['version']}, expected {VERSION}")
    return tuple(_entry(item) for item in data["layers"])


def _entry(item: Mapping[str, Any]) -> LayerLaunches:
    rows = tuple(
        MeasuredLaunch(
            row["tokens"],
            row["family"],
            row["tile"],
            row["us"],
            tuple(SlowerLaunch(it["family"], it["tile"], it["ratio"]) for it in row.get("slower", ())),
        )
        for row in item["rows"]
    )
    major, minor = item["capability"]
    gpu = GpuModel((major, minor), item["sms"])
    sizes = (item["hidden"], item["intermediate"], item["experts"], item["top_k"])
    return LayerLaunches(gpu, item["weight"], *sizes, rows, item["act"])


MAX_CACHE_DISTANCE = 0.5
"""Maximum distance, in powers of two of the number of tokens, at which a row of the user's cache is used."""


def tuned(problem: MoEProblem, device: Device) -> tuple[MeasuredLaunch, ...]:
    """Launches that `moectl tune` measured for this layer on `device`.

    A cache file that cannot be used is ignored, with one `CacheWarning`.
    """
    rows, note = rows_of(problem, device)
    if note:
        warnings.warn(note, CacheWarning, stacklevel=2)
    return tuple(MeasuredLaunch(row.tokens, row.family, row.tile, row.us) for row in rows)


def near(rows: Sequence[MeasuredLaunch], tokens: int) -> Iterator[MeasuredLaunch]:
    """Those of `rows` whose number of tokens is near `tokens`, nearest first."""
    distances = {row.tokens: abs(math.log2(row.tokens / tokens)) for row in rows}
    for row in sorted(rows, key=lambda row: distances[row.tokens]):
        if distances[row.tokens] <= MAX_CACHE_DISTANCE:
            yield row


def own_rows(problem: MoEProblem, gpu: GpuModel) -> tuple[MeasuredLaunch, ...]:
    """Shipped launches of this very layer on GPUs of this model; none for a rank's share of the experts."""
    found = (entry.rows for entry in entries() if entry.gpu == gpu and entry.is_of(problem))
    return tuple(row for rows in found for row in rows)
