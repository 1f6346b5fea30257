"""Times of one layer on several backends against the memory and compute floor, correctness first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .errors import UsageError
from .floors import Floor, Rates, Work, floor_of
from .kernels.inputs import Inputs, make_inputs
from .kernels.prepared import DenseExpert, PreparedMoE
from .kernels.reference import moe_reference
from .kernels.roofline import work_of
from .kernels.runners import Runner, runner_for
from .kernels.timing import Timing, last_level_cache, measured_rates, time_calls
from .kernels.tolerance import CheckResult, check, tolerance_for

COLD_FACTOR = 4
"""How many times larger than the last-level cache a layer is whose calls stay cold one after another."""

CHECKED_TOKENS = 32
"""Tokens whose result is compared with the reference; the others are checked to be finite."""


@dataclass(frozen=True, slots=True)
class Row:
    """One backend at one number of tokens.

    Attributes:
        check: the comparison with the reference on `checked_tokens` of the tokens.
        timing: None when the check failed: a wrong result has no time.
        gb_per_s, tflop_per_s: what the median time makes of `work`.
        floor_percent: the floor's share of the median time, in percent.
    """

    backend: str
    layout: str
    tokens: int
    work: Work
    floor: Floor
    check: CheckResult
    checked_tokens: int
    timing: Timing | None = None
    gb_per_s: float = 0.0
    tflop_per_s: float = 0.0
    floor_percent: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a bench is run.

    Attributes:
        seed: of inputs and routings.
        distribution: of the routing, as in `make_inputs`.
        repeats: measurements per row.
        cold: flush caches before each measurement.
        rates: of the device; None measures them.
    """

    seed: int = 0
    distribution: str = "uniform"
    repeats: int = 11
    cold: bool = True
    rates: Rates | None = field(default=None)


def bench(
    prepared: Mapping[str, PreparedMoE],
    tokens: Sequence[int],
    reference: Callable[[int], DenseExpert],
    options: BenchOptions = BenchOptions(),
) -> Iterator[Row]:
    """One `Row` per number of tokens and backend, as soon as each is measured.

    Args:
        prepared: the same layer by backend name, all on one device.
        tokens: numbers of tokens, at least one each.
        reference: the decoded expert of an id, from the checkpoint's own storage where there is one.

    Raises UsageError when there is nothing to measure, or the layers are on different devices.
    """
    devices = {p.device for p in prepared.values()}
    if len(devices) != 1 or not tokens or min(tokens) < 1:
        raise UsageError("a bench needs backends on one device and positive numbers of tokens")
    device = devices.pop()
    rates = options.rates or measured_rates(device)
    for count in tokens:
        sets = _input_sets(next(iter(prepared.values())), count, options, device)
        sample = _sample(count)
        expected = _expected(sets[0], sample, reference, next(iter(prepared.values())))
        for name, layer in prepared.items():
            yield _row(runner_for(name), layer, sets, expected, rates, options)


def _input_sets(layer: PreparedMoE, tokens: int, options: BenchOptions, device: torch.device) -> list[Inputs]:
    """Inputs with different routings.

    On CUDA several are timed together, so that launching a graph counts little; a layer that a few
    caches would hold is timed one call at a time, as its weights would be found in the cache.
    """
    several = device.type == "cpu" or layer.nbytes > COLD_FACTOR * last_level_cache(device)
    count = 1 if not several else max(1, min(12, 2048 // tokens)) if device.type == "cuda" else 3
    made = [
        make_inputs(layer.problem, tokens, options.seed + i, options.distribution, device=device)
        for i in range(count)
    ]
    return [replace(inputs, ids=layer.local_ids(inputs.ids)) for inputs in made]


def _sample(tokens: int) -> Tensor:
    """Evenly spread token numbers, first and last included."""
    return torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS)).round().long()


@dataclass(frozen=True)
class _Expected:
    tokens: Tensor
    y: Tensor


def _expected(
    inputs: Inputs, sample: Tensor, reference: Callable[[int], DenseExpert], layer: PreparedMoE
) -> _Expected:
    sample = sample.to(inputs.x.device)
    x, ids, weights = (t[sample] for t in (inputs.x, inputs.ids, inputs.weights))
    return _Expected(sample, moe_reference(x, ids, weights, reference, layer.problem))


def _row(
    runner: Runner,
    layer: PreparedMoE,
    sets: list[Inputs],
    expected: _Expected,
    rates: Rates,
    options: BenchOptions,
) -> Row:
    first = sets[0]
    y = runner.run(layer, first.x, first.ids, first.weights)
    result = _checked(y, expected, layer, runner)
    work = _mean_work([work_of(layer.problem, s.ids) for s in sets])
    floor = floor_of(work, rates)
    common = (runner.name, layer.layout, len(first.x), work, floor, result, len(expected.tokens))
    if not result.ok:
        return Row(*common)
    timing = time_calls(
        [_call(runner, layer, s) for s in sets],
        layer.device,
        repeats=options.repeats,
        cold=options.cold,
        capturable=runner.capturable,
    )
    seconds = timing.median_us * 1e-6
    return Row(
        *common,
        timing,
        work.bytes / seconds / 1e9,
        work.flops / seconds / 1e12,
        100 * floor.seconds / seconds,
    )


def _checked(y: Tensor, expected: _Expected, layer: PreparedMoE, runner: Runner) -> CheckResult:
    """The sample against the reference; a value that is not finite anywhere in `y` fails it."""
    tolerance = tolerance_for(layer.problem, runner.accumulation)
    bad = torch.nonzero(~torch.isfinite(y).all(1)).flatten()
    if len(bad):
        return CheckResult(float("nan"), float("nan"), int(bad[0]), float("nan"), tolerance, False)
    result = check(y[expected.tokens], expected.y, tolerance)
    worst = int(expected.tokens[result.worst_token])
    return CheckResult(result.max, result.rms, worst, result.worst_rms, tolerance, result.ok)


def _mean_work(works: list[Work]) -> Work:
    """The average over routings, which is what a time averaged over routings has to be held against."""
    n = len(works)
    return Work(
        sum(w.weight_bytes for w in works) // n,
        sum(w.activation_bytes for w in works) // n,
        sum(w.flops for w in works) // n,
        round(sum(w.experts for w in works) / n),
    )


def _call(runner: Runner, layer: PreparedMoE, inputs: Inputs) -> Callable[[], object]:
    return lambda: runner.run(layer, inputs.x, inputs.ids, inputs.weights)
