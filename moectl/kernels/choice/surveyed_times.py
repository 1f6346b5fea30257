"""Times of launches of many layers, which ship with the package (``surveyed.json``), and what they correct.

``scripts/survey_launches`` times launches of published layers, whole and sliced, and ``scripts/pack_surveys``
keeps the times. The model's error for a launch at one number of tokens is mostly about the same at the next
ones; `corrected` removes it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ...capabilities.own_kernels import act_used
from ...problem.moe_problem import MoEProblem

FILE = "surveyed.json"
VERSION = 1
"""Raised when a field of `FILE` is renamed or changes its meaning."""

NEAR = 0.7
"""Powers of two of the number of tokens within which a measurement's weight falls to 1/e."""

DOUBT = 0.2
"""Weight of the model's prediction beside that of a measurement at the same number of tokens, 1."""

UNSEEN = 0.06
"""How much slower other launches count (in logarithms) where some were measured: the model is off by as
much, so that the one of many that it predicts to be the fastest is mostly slower than predicted."""

LEVEL = 1.0
"""Weight of the model beside the launches of a cell, of which the fastest counts 1 and others less, in what
it says too much or too little of all of them: the choice is among their ratios."""


class SurveyKey(NamedTuple):
    """What tells layers apart here, in the file and out of it.

    Attributes:
        weight: the weights' format as text.
        act: that of tokens as kernels take them, see `act_used`.
        gated: experts have a gate.
    """

    weight: str
    act: str
    hidden: int
    intermediate: int
    experts: int
    local_experts: int
    top_k: int
    gated: bool


class SurveyedLayer(NamedTuple):
    """A layer's launches on one GPU.

    Attributes:
        gpu: the GPU's name.
        cells: by number of tokens, (kernel family, fields of its tile, microseconds) of each launch.
    """

    gpu: str
    cells: Mapping[int, Sequence[tuple[str, Mapping[str, int], float]]]


class Evidence(NamedTuple):
    """What measurements of a cell say of predicted times: logarithms of what these lack.

    Attributes:
        tokens: binary logarithm of the number of tokens.
        errors: by launch, beyond what all launches of the cell have in common.
    """

    tokens: float
    errors: Mapping[int, float]


def key_of(problem: MoEProblem) -> SurveyKey:
    """The key of a layer, or of a rank's share of it.

    Example:
        >>> from moectl.problem.published_layers import model_problem
        >>> key_of(model_problem("qwen3-30b", "fp8-block"))[:4]
        ('fp8 block 128x128', 'fp8 dynamic', 2048, 768)
    """
    sizes = (problem.dims.hidden, problem.dims.intermediate, problem.experts, problem.local_experts)
    formats = str(problem.scheme.weight), act_used(problem)
    return SurveyKey(*formats, *sizes, problem.top_k, problem.activation.gated)


def surveyed(problem: MoEProblem) -> Iterator[SurveyedLayer]:
    """What was measured of a layer, on each GPU.

    ValueError if the file of the package is of another version.

    Example:
        >>> from moectl.problem.published_layers import model_problem
        >>> [layer.gpu for layer in surveyed(model_problem("qwen3.5-35b", "int4-g128"))]
        ['NVIDIA H200']
    """
    launches, layers = _file()
    for item in layers.get(key_of(problem), ()):
        yield SurveyedLayer(
            item["gpu"],
            {
                int(tokens): [(*launches[number], us) for number, us in cell]
                for tokens, cell in item["times"].items()
            },
        )


@cache
def _file() -> tuple[
    Sequence[tuple[str, Mapping[str, int]]], Mapping[SurveyKey, Sequence[Mapping[str, Any]]]
]:
    """The launches by number, and the layers by `SurveyKey`."""
    data = json.loads((files(__package__) / FILE).read_text("utf-8"))
    if data["version"] != VERSION:
        raise ValueError(f"{FILE} has version {data['version']}, expected {VERSION}")
    layers: dict[SurveyKey, list[Mapping[str, Any]]] = defaultdict(list)
    for item in data["layers"]:
        layers[SurveyKey(*(item[name] for name in SurveyKey._fields))].append(item)
    return [(family, tile) for family, tile in data["launches"]], layers


def evidence_of(
    cells: Mapping[int, Mapping[int, float]], us: Sequence[Sequence[float]], sizes: Sequence[int]
) -> list[Evidence]:
    """What the cells of a layer say of predicted times; nothing of cells with one known launch.

    Args:
        cells: by number of tokens, measured microseconds by the launch's place in `us`.
        us: predicted microseconds of each launch at each of `sizes`, on the GPU that was measured.
        sizes: numbers of tokens in ascending order.
    """
    found = []
    for tokens, cell in cells.items():
        errors = {
            place: math.log(time / predicted)
            for place, time in cell.items()
            if (predicted := _between(us[place], sizes, tokens)) < math.inf
        }
        if len(errors) > 1:
            fastest = min(cell[place] for place in errors)
            weights = {place: (fastest / cell[place]) ** 2 for place in errors}
            common = sum(weights[place] * error for place, error in errors.items())
            common /= sum(weights.values()) + LEVEL
            beyond = {place: error - common for place, error in errors.items()}
            found.append(Evidence(math.log2(tokens), beyond))
    return found


def _between(us: Sequence[float], sizes: Sequence[int], tokens: int) -> float:
    """A time between those of two sizes, or that of the only one of them which is known."""
    above = min(bisect_left(sizes, tokens), len(sizes) - 1)
    below = above if sizes[above] <= tokens else max(above - 1, 0)
    low, high = us[below], us[above]
    if below == above or math.inf in (low, high):
        return min(low, high)
    part = math.log(tokens / sizes[below]) / math.log(sizes[above] / sizes[below])
    return math.exp((1 - part) * math.log(low) + part * math.log(high))


def corrected(
    us: Sequence[Sequence[float]], sizes: Sequence[int], evidence: Sequence[Evidence]
) -> list[list[float]]:
    """Predicted times of a layer's launches at each of `sizes`, with what measurements near them say.

    Args:
        us: predicted microseconds of each launch at each of `sizes`; infinite ones stay so.
        sizes: numbers of tokens.
        evidence: of cells of the layer; `Evidence.errors` are by a launch's place in `us`.

    Example:
        >>> measured = evidence_of({8: {0: 30.0, 1: 10.0}}, [[10.0, 80.0], [10.0, 80.0]], [8, 64])
        >>> slow, fast = corrected([[10.0, 80.0], [10.0, 80.0]], [8, 64], measured)
        >>> round(slow[0] / fast[0], 1), round(slow[1] / fast[1], 2)
        (2.5, 1.07)
    """
    if not evidence:
        return [list(times) for times in us]
    weights = [[math.exp(-abs(it.tokens - math.log2(size)) / NEAR) for it in evidence] for size in sizes]
    slower = [UNSEEN * most / (most + DOUBT) for most in map(max, weights)]
    made = []
    for place, times in enumerate(us):
        errors = [(i, it.errors[place]) for i, it in enumerate(evidence) if place in it.errors]
        row = []
        for time, at, unseen in zip(times, weights, slower, strict=True):
            known = sum(at[i] for i, _ in errors)
            error = sum(at[i] * error for i, error in errors) + DOUBT * unseen
            row.append(time * math.exp(error / (known + DOUBT)))
        made.append(row)
    return made
