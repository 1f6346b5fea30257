"""Which launches a layer takes: a few, each for a range of numbers of tokens.

They are chosen by the model of time, and by what was measured of this very layer. Where the layer has rows,
a row says which launch was the fastest, and how much longer some others took; of the rest the model says it.
Otherwise the times of a survey correct what the model predicts (`surveyed_times`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import indexOf
from types import MappingProxyType
from typing import Any, NamedTuple

from ...environment.named_devices import find_device
from ...errors import UsageError
from ...problem.moe_problem import MoEProblem
from .launch import Launch
from .launch_model import (
    FITTED_CAPABILITY,
    USUAL_BANDWIDTH,
    GpuRates,
    fitted,
    load_of,
    predicted_us,
    seconds,
    work_of,
)
from .launch_shape import LaunchShape
from .launch_table import GpuModel, own_rows, tokens_per_expert
from .mid_launches import MID_TILES
from .portable_launches import DECODE_TILES, FORMATS, GROUPED_TILES
from .prefill_launches import PREFILL_TILES
from .stream_launches import STREAM_TILES
from .surveyed_times import Evidence, SurveyedLayer, corrected, evidence_of, surveyed
from .tile_family import TileFamily, launch_of
from .tma_launches import TMA_TILES
from .warpwise_launches import WARPWISE_TILES

TILE_FAMILIES: Mapping[str, TileFamily] = {
    "stream": STREAM_TILES,
    "mid": MID_TILES,
    "prefill": PREFILL_TILES,
    "warpwise": WARPWISE_TILES,
    "tma": TMA_TILES,
    "decode": DECODE_TILES,
    "grouped": GROUPED_TILES,
}
"""The kernel families, by `Launch.family`."""

PORTABLE = ("decode", "grouped")
"""Families that run every layer on every GPU. A layer takes none of their launches where others suit all
numbers of tokens: those are faster, and few measurements of both in one cell show by how much."""

MOST_TOKENS = 16384
"""Numbers of tokens up to which launches are compared and, by default, a layer's binaries are compiled; more
take the launch of this one, if a plan has one."""

SIZES = tuple(sorted({round(2 ** (half / 2)) for half in range(2 * int(math.log2(MOST_TOKENS)) + 1)}))
"""Numbers of tokens at which launches are compared, two for each power of two."""

MOST_BINARIES = 12
"""Compiled kernels of a layer over all numbers of tokens: GEMMs, and the small ones around them
(`TileFamily.small_binaries`)."""

MOST_IF_MEASURED = 16
"""The same for a layer with measured launches: with fewer, some of the fastest would have to be left out."""

SEVERITY = 2.0
"""How much more a large loss counts than several small ones: one launch far from the fastest is noticed."""

WORTH = 0.001
"""Mean gain of predicted time over all `SIZES` for which another launch is added."""

UNMEASURED = 1.06
"""Least ratio of another launch's time to that of the one that a row says was the fastest: the model may
predict that the other takes as long or less, but it was not measured to. With 1.03, Qwen3-30B took launches
in three of its 14 measured cells that were not timed there."""

SINGLE, SEVERAL, MOST_SEVERAL = 4.0, 1.5, 8
"""How much losses count in layers without measurements: `SINGLE` at one token, `SEVERAL` up to
`MOST_SEVERAL`.

Decoding a few sequences is what latency is judged by, and there the model is least sure of what is fastest.
With equal counts, launches took 4.9% longer than the fastest measured ones at one token instead of 2.3%, in
34 cells, and no less at many tokens.
"""

KNOWN = 2.0
"""How much losses count at numbers of tokens that were measured, but at one (`SINGLE`): what the model says
of others, which count 1 in such layers, is less certain."""

FEW, WITH_FEW = 1.5, 1.03
"""Tiles of families that were made for several tokens of an expert count as this much slower below so many:
few launches were measured there, and they are chosen only where they are predicted to be clearly faster."""

UNFITTED = 1000.0
"""Loss of a launch where it was not fitted: beyond those of all that were, at all sizes."""


class CandidateLaunch(NamedTuple):
    """A launch that a layer may take.

    Attributes:
        launch: the launch.
        shape: what the model of time knows of it.
        tokens_per_expert: where it was fitted: lowest and highest average of active experts.
        single: whether its kernels are compiled for one token, or for more; None if that is the same.
        most_tokens: in all, for which it is worth measuring.
    """

    launch: Launch
    shape: LaunchShape
    tokens_per_expert: tuple[float, float]
    single: bool | None = None
    most_tokens: float = math.inf

    @staticmethod
    def each_of(problem: MoEProblem, launch: Launch) -> list[CandidateLaunch]:
        """The candidates of a launch, by what is compiled of it."""
        family = TILE_FAMILIES[launch.family]
        shape, most = family.shape(problem, launch.tile), family.most_tokens(problem)
        forms = (True, False) if shape.lists else (None,)
        return [CandidateLaunch(launch, shape, family.tokens_per_expert, single, most) for single in forms]

    def suits(self, problem: MoEProblem, tokens: int, per_expert: float) -> bool:
        """Whether it was fitted for `per_expert` tokens of active experts, at `tokens` in all.

        At one token no expert has two: tiles that are wider than the family's narrowest, where they are not
        compiled for that, compute columns for nothing, and were up to 20% slower than predicted.
        """
        fewest, most = self.tokens_per_expert
        if not fewest <= per_expert <= most or tokens > self.most_tokens:
            return False
        family = TILE_FAMILIES[self.launch.family]
        if self.single is None:
            return tokens > 1 or max(self.shape.widths, default=0) <= family.narrowest
        return self.single == (tokens == 1) and family.suits(problem, self.launch.tile, per_expert)

    def caution(self, per_expert: float) -> float:
        """By what its predicted time is multiplied, at `per_expert` tokens of active experts."""
        return WITH_FEW if per_expert < FEW and self.tokens_per_expert[0] >= 1 else 1.0

    @property
    def binaries(self) -> frozenset[object]:
        """Its compiled GEMMs; those of equal shapes are one, which launches share."""
        family, name = self.launch.family, self.shape.name
        gemms = tuple(gemm.binary for gemm in self.shape.gemms)
        if _is_fused(self.launch.tile):
            return frozenset([(family, name, gemms)])
        return frozenset((family, name, self.single, *indexed) for indexed in enumerate(gemms))


def _is_fused(tile: Any) -> bool:
    """Whether both GEMMs are one launch."""
    return bool(getattr(tile, "fused", 0))


class Plan(NamedTuple):
    """Launches by number of tokens.

    Attributes:
        most: largest number of tokens of each range, in ascending order; the last range has more tokens, too.
        launches: the launch of each range.
    """

    most: tuple[int, ...]
    launches: tuple[Launch, ...]

    def launch(self, tokens: int) -> Launch:
        """The launch for `tokens` tokens."""
        return self.launches[bisect_left(self.most, min(tokens, MOST_TOKENS))]


@lru_cache(maxsize=256)
def planned(problem: MoEProblem, gpu: GpuRates, capability: tuple[int, int]) -> Plan | None:
    """The launches of a layer; None if the model of time knows no kernels for it on the GPU."""
    return plan_with(problem, gpu, capability, surveyed(problem))


def plan_with(
    problem: MoEProblem, gpu: GpuRates, capability: tuple[int, int], surveys: Iterable[SurveyedLayer]
) -> Plan | None:
    """`planned`, with what was surveyed of the layer given."""
    special = [name for name in TILE_FAMILIES if name not in PORTABLE]
    candidates = _candidates(problem, gpu, capability, special)
    spread = {m: tokens_per_expert(problem, m) for m in SIZES}
    if not all(any(it.suits(problem, *each) for it in candidates.values()) for each in spread.items()):
        candidates |= _candidates(problem, gpu, capability, PORTABLE)
    families = {launch.family for launch, _ in candidates}
    small = max((TILE_FAMILIES[name].small_binaries(problem) for name in families), default=0)
    rows: dict[int, dict[tuple[Launch, bool | None], float]] = {}
    model = GpuModel(capability, gpu.sms)
    for row in own_rows(problem, model):
        found = [(row.family, row.tile, 1.0), *((it.family, it.tile, it.ratio) for it in row.slower)]
        for family, tile, ratio in found:
            launch = launch_of(TILE_FAMILIES, family, tile)
            if launch and row.tokens in SIZES and not TILE_FAMILIES[launch.family].fits(problem, launch.tile):
                forms = CandidateLaunch.each_of(problem, launch)
                made = next(it for it in forms if it.single is None or it.single == (row.tokens == 1))
                candidates[made.launch, made.single] = made
                rows.setdefault(row.tokens, {})[made.launch, made.single] = ratio
    places = {key: place for place, key in enumerate(candidates)}
    measured = {tokens: {places[key]: ratio for key, ratio in row.items()} for tokens, row in rows.items()}
    survey = None if measured else _nearest(surveys, gpu, model, places)
    return plan(problem, gpu, [*candidates.values()], measured, small, survey)


class Survey(NamedTuple):
    """Measured times of a layer's candidates on one GPU.

    Attributes:
        gpu: the rates of the GPU that was measured.
        cells: by number of tokens, microseconds of the candidates that were measured.
    """

    gpu: GpuRates
    cells: Mapping[int, Mapping[int, float]]


def _nearest(
    layers: Iterable[SurveyedLayer],
    gpu: GpuRates,
    model: GpuModel,
    places: Mapping[tuple[Launch, bool | None], int],
) -> Survey | None:
    """What was surveyed on the GPU of a model whose bandwidth is nearest; `places` are the candidates'."""
    found = []
    for layer in layers:
        device = find_device(layer.gpu)
        if model == GpuModel(divmod(device.capability, 10), device.sms):
            rates = GpuRates.of_gpu(device.name, device.sms, device.bandwidth, model.capability)
            found.append((rates, layer))
    if not found:
        return None
    rates, layer = min(found, key=lambda it: abs(math.log(it[0].bandwidth / gpu.bandwidth)))
    cells: dict[int, dict[int, float]] = {}
    for tokens, cell in layer.cells.items():
        for family, tile, us in cell:
            launch = launch_of(TILE_FAMILIES, family, tile)
            keys = ((launch, form) for form in (None, tokens == 1) if launch is not None)
            place = next((places[key] for key in keys if key in places), None)
            if place is not None:
                cells.setdefault(tokens, {})[place] = us
    return Survey(rates, cells)


USUAL_GPU = GpuRates(132, USUAL_BANDWIDTH)
"""An H100's rates, for `launch_for`."""


@lru_cache(maxsize=256)
def _portable_plan(problem: MoEProblem) -> Plan | None:
    found = _candidates(problem, USUAL_GPU, FITTED_CAPABILITY, PORTABLE)
    return plan(problem, USUAL_GPU, [*found.values()], small=GROUPED_TILES.small_binaries(problem))


def launch_for(problem: MoEProblem, tokens: int) -> Launch:
    """The portable kernels' launch for `tokens` tokens, wherever they run; UsageError if they do not support
    the layer's format."""
    found = _portable_plan(problem)
    if found is None:
        weight = problem.scheme.weight
        raise UsageError(f"the portable kernels support {', '.join(FORMATS)} weights; the layer has {weight}")
    return found.launch(tokens)


def _candidates(
    problem: MoEProblem, gpu: GpuRates, capability: tuple[int, int], families: Iterable[str]
) -> dict[tuple[Launch, bool | None], CandidateLaunch]:
    """The fitted launches of `families` that run on a GPU, by launch and `CandidateLaunch.single`."""
    found = {}
    for name in families:
        family = TILE_FAMILIES[name]
        lowest, highest = family.capability
        for tile in family.candidates(problem) if lowest <= capability <= highest else ():
            if capability != FITTED_CAPABILITY and _is_fused(tile):
                continue  # programs wait for others, which nobody has tried there
            for made in CandidateLaunch.each_of(problem, Launch(name, tile)):
                known = fitted(name, made.shape, problem.scheme.weight) is not None
                most = max(gemm.shared for gemm in made.shape.gemms)
                if known and most <= gpu.shared and not family.fits(problem, tile):
                    found[made.launch, made.single] = made
    return found


def plan(
    problem: MoEProblem,
    gpu: GpuRates,
    candidates: Sequence[CandidateLaunch],
    measured: Mapping[int, Mapping[int, float]] = MappingProxyType({}),
    small: int = 3,
    survey: Survey | None = None,
) -> Plan | None:
    """The launches of a layer; None if no candidate suits one of `SIZES`.

    They are few, within `MOST_BINARIES` or `MOST_IF_MEASURED`: those whose fastest is nearest to the fastest
    of all candidates, on average over these sizes.

    Args:
        candidates: those of unfitted families or formats are only taken where they are `measured`.
        measured: at some of `SIZES`, the candidates that were measured, by how much longer they took than the
            fastest.
        small: compiled kernels beside the GEMMs.
        survey: what else was measured, at any numbers of tokens, which corrects predicted times. Where the
            launch of the next size begins between two sizes, the predicted times decide as they are.
    """
    us = _predicted(problem, gpu, candidates)
    if not us or math.inf in map(min, zip(*us, strict=True)):
        return None
    evidence: list[Evidence] = []
    if survey is not None:
        there = us if survey.gpu == gpu else _predicted(problem, survey.gpu, candidates)
        evidence = evidence_of(survey.cells, there, SIZES)
    us = _corrected(corrected(us, SIZES, evidence), measured)
    # What a measured launch takes by the model, since it is the model that compares the others with it.
    rows = [measured.get(tokens, {}) for tokens in SIZES]
    reference = [
        _of_fastest(times, row) if row else min(times)
        for times, row in zip(zip(*us, strict=True), rows, strict=True)
    ]
    # A loss for each candidate at each number of tokens.
    losses = [
        [
            _loss_beside(time / best, row, index) * _weight(tokens, measured)
            for tokens, time, best, row in zip(SIZES, times, reference, rows, strict=True)
        ]
        for index, times in enumerate(us)
    ]
    most_gemms = (MOST_IF_MEASURED if measured else MOST_BINARIES) - small
    chosen = _chosen(losses, [candidate.binaries for candidate in candidates], most_gemms)
    least = [list(each) for each in zip(*(losses[index] for index in chosen), strict=True)]
    if not least or max(map(min, least)) >= UNFITTED:
        return None
    picks = [chosen[indexOf(each, min(each))] for each in least]
    ends = [i for i, pick in enumerate(picks) if i + 1 == len(picks) or picks[i + 1] != pick]
    most = [MOST_TOKENS] * len(ends)
    for place, i in enumerate(ends[:-1]):
        here, following = candidates[picks[i]], candidates[picks[i + 1]]
        # Between two sizes the launch of the nearer one is taken, if it suits so many. The next one's begins
        # earlier if it suits fewer, and is faster. It may begin a little before it suits: held back until
        # then, that of an INT8 layer took 1.17 times as long as the fastest that was measured.
        between = int(math.sqrt(SIZES[i] * SIZES[i + 1]))
        between = min(between, int(min(here.most_tokens, MOST_TOKENS)))
        if us[picks[i + 1]][i] == math.inf:
            before = _first_suited(problem, following, SIZES[i], SIZES[i + 1]) - 1
            if before < between and _faster(problem, before + 1, gpu, following, here):
                between = before
        most[place] = max(SIZES[i], between)
    return Plan(tuple(most), tuple(candidates[picks[i]].launch for i in ends))


def _first_suited(problem: MoEProblem, candidate: CandidateLaunch, unsuited: int, suited: int) -> int:
    """The fewest tokens that a candidate suits, which are more than `unsuited` and at most `suited`."""
    return bisect_left(
        range(suited),
        True,
        unsuited + 1,
        key=lambda tokens: candidate.suits(problem, tokens, tokens_per_expert(problem, tokens)),
    )


def _faster(
    problem: MoEProblem, tokens: int, gpu: GpuRates, one: CandidateLaunch, other: CandidateLaunch
) -> bool:
    """Whether `one` is predicted to take less time than `other`; not if either was not fitted."""
    times = [predicted_us(problem, tokens, it.launch.family, it.shape, gpu) for it in (one, other)]
    return times[0] is not None and times[1] is not None and times[0] < times[1]


def _of_fastest(times: Sequence[float], measured: Mapping[int, float]) -> float:
    """Predicted time of the launch that was measured to be the fastest; of any if it was not fitted."""
    time = times[min(measured, key=measured.__getitem__)]
    return min(times) if time == math.inf else time


def _corrected(us: list[list[float]], measured: Mapping[int, Mapping[int, float]]) -> list[list[float]]:
    """Predicted times, at each of `SIZES`, with what measurements say of those next to theirs.

    A launch that was measured to be the fastest is mostly predicted to take a little longer than another: by
    that ratio the model says too much of it. Its times at the next sizes, for which the model decides, are
    divided by the square root of that.
    """
    corrected = [times.copy() for times in us]
    fastest = {tokens: min(row, key=row.__getitem__) for tokens, row in measured.items()}
    for tokens, index in fastest.items():
        size = SIZES.index(tokens)
        over = us[index][size] / min(times[size] for times in us)
        for beside in (size - 1, size + 1):
            if over < math.inf and 0 <= beside < len(SIZES) and fastest.get(SIZES[beside]) != index:
                corrected[index][beside] /= math.sqrt(over)
    return corrected


def _predicted(
    problem: MoEProblem, gpu: GpuRates, candidates: Sequence[CandidateLaunch]
) -> list[list[float]]:
    """Microseconds of each candidate at each of `SIZES`; infinite where it was not fitted."""
    loads = [load_of(problem, tokens) for tokens in SIZES]
    spread = [tokens_per_expert(problem, tokens) for tokens in SIZES]
    predicted = []
    for candidate in candidates:
        of = fitted(candidate.launch.family, candidate.shape, problem.scheme.weight)
        if of is None:
            predicted.append([math.inf] * len(SIZES))
            continue
        predicted.append(
            [
                1e6 * seconds(work_of(load, candidate.shape), gpu, of) * candidate.caution(per_expert)
                if candidate.suits(problem, tokens, per_expert)
                else math.inf
                for tokens, load, per_expert in zip(SIZES, loads, spread, strict=True)
            ]
        )
    return predicted


def _weight(tokens: int, measured: Mapping[int, Any]) -> float:
    """How much losses at a number of tokens count, in a layer that was `measured` at some."""
    if measured and tokens not in measured:
        return 1.0
    if tokens == 1:
        return SINGLE
    return KNOWN if measured else SEVERAL if tokens <= MOST_SEVERAL else 1.0


def _loss_beside(ratio: float, measured: Mapping[int, float], index: int) -> float:
    """`_loss` of the candidate `index`, which takes `ratio` times as long as the reference by the model."""
    if index in measured:
        return _loss(measured[index])
    if ratio == math.inf:
        return UNFITTED
    return _loss(max(ratio, UNMEASURED) if measured else ratio)


def _loss(ratio: float) -> float:
    """What a launch loses that takes `ratio` times the fastest one's time."""
    loss = math.log(ratio)
    return loss + SEVERITY * loss * loss


Losses = Sequence[Sequence[float]]
"""Of each candidate, at each number of tokens."""


def _chosen(losses: Losses, binaries: Sequence[frozenset[object]], limit: int) -> list[int]:
    """Candidates whose least loss is small on average, with at most `limit` binaries.

    They are added one after another, each the one that gains most, then exchanged while that gains more.
    """
    chosen: list[int] = []
    while (added := _best_candidate(losses, chosen, binaries, limit)) is not None:
        chosen.append(added)
    for _ in range(len(chosen)):
        before = chosen.copy()
        for i, index in enumerate(chosen):
            better = _best_candidate(losses, chosen[:i] + chosen[i + 1 :], binaries, limit)
            chosen[i] = index if better is None else better
        if chosen == before:
            break
    return chosen


def _best_candidate(
    losses: Losses, chosen: Sequence[int], binaries: Sequence[frozenset[object]], limit: int
) -> int | None:
    """The candidate that gains most beside those `chosen`; None if none gains `WORTH` within the limit."""
    compiled = frozenset[object]().union(*(binaries[index] for index in chosen))
    best = [2 * UNFITTED] * len(losses[0])
    for index in chosen:
        best = list(map(min, best, losses[index]))
    now = sum(best)
    gains = [
        (now - sum(map(min, best, loss))) / len(best) if len(compiled | own) <= limit else 0.0
        for loss, own in zip(losses, binaries, strict=True)
    ]
    most = max(gains)
    return gains.index(most) if most >= WORTH else None
