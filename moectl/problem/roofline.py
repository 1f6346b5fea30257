"""The roofline time of a layer: the bytes it must move and the operations it must do."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from ..environment import Device
from .moe_problem import MoEProblem, expert_range
from .number_formats import number_format

ACTIVATION_BYTES = 2
"""Bytes per value of the input and output tokens."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The minimum work of one call of a layer.

    Attributes:
        weight_bytes: weights, scales, zero points and biases of the active experts, each read once.
        activation_bytes: input tokens read once, and the result written once.
        flops: two per weight and assignment.
        assignments: pairs of a token and one of the rank's experts.
        experts: number of active experts.
    """

    weight_bytes: int
    activation_bytes: int
    flops: int
    assignments: float
    experts: float

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Peak rates of a device: memory `bandwidth` in bytes/s, matrix `flops` in FLOP/s, and their `source`.

    0 stands for an unknown rate.
    """

    bandwidth: float
    flops: float
    source: str


@dataclass(frozen=True, slots=True)
class MeasuredRates(DeviceRates):
    """Rates measured on a device: `flops` of 16-bit matrices, and those of FP8, 0 if it has none.

    Those of FP8 stand for INT8, too, which SM90 multiplies at the same published rate; without FP8, those of
    16 bits do.
    """

    fp8_flops: float = 0.0

    def for_tokens(self, act: str) -> DeviceRates:
        """The rates of products of tokens in the activation format named `act`.

        Example:
            >>> MeasuredRates(4e12, 8e14, "measured", 1.3e15).for_tokens("fp8").flops
            1300000000000000.0
        """
        of_8_bits = act == "int8" or number_format(act).grid.matrix_unit == "fp8"
        flops = self.fp8_flops if of_8_bits and self.fp8_flops else self.flops
        return DeviceRates(self.bandwidth, flops, self.source)


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """The minimum time in seconds, and what limits it: ``memory`` or ``compute``."""

    seconds: float
    bound: str


def work_of_hits(problem: MoEProblem, tokens: int, assignments: float, experts: float) -> LayerWork:
    """The work of one rank for `tokens` with `assignments` to `experts` active experts of the rank."""
    dims = problem.dims
    matrices = 3 if problem.activation.gated else 2
    return LayerWork(
        weight_bytes=round(experts * problem.expert_bytes()),
        activation_bytes=2 * tokens * dims.hidden * ACTIVATION_BYTES,
        flops=round(2 * matrices * dims.hidden * dims.intermediate * assignments),
        assignments=assignments,
        experts=experts,
    )


def uniform_work(problem: MoEProblem, tokens: int) -> LayerWork:
    """The expected work of one rank for `tokens` that select their top-k experts uniformly at random.

    An expert is inactive with probability (1 - k/E)^M, so E (1 - (1 - k/E)^M) experts are active. With
    expert parallelism, a step takes as long as its most loaded rank: active experts and assignments are the
    expected maxima over the ranks (`expected_largest_share`), of the active among E experts and of the M k
    assignments among M E pairs of a token and an expert.

    Example:
        >>> from moectl.problem.moe_problem import Parallel
        >>> from moectl.problem.published_layers import MODELS
        >>> problem = MODELS["gpt-oss-20b"]
        >>> round(uniform_work(problem, 8).experts, 1)
        21.0
        >>> round(uniform_work(problem.on(Parallel(tp=8, ep=True)), 8).experts, 1)
        3.9
    """
    share = problem.top_k / problem.experts
    active = problem.experts * (1 - (1 - share) ** tokens)
    ranks = problem.parallel.ep_size
    if ranks == 1:
        return work_of_hits(problem, tokens, tokens * problem.top_k, active)
    sizes = Counter(
        end - first for first, end in (expert_range(problem.experts, ranks, rank) for rank in range(ranks))
    )
    pairs = tuple((size * tokens, count) for size, count in sizes.items())
    assignments = expected_largest_share(pairs, tokens * problem.top_k)
    return work_of_hits(problem, tokens, assignments, expected_largest_share(tuple(sizes.items()), active))


FEW = 16
"""Drawn items up to which `expected_largest_share` is exact."""


@cache
def expected_largest_share(groups: tuple[tuple[int, int], ...], drawn: float) -> float:
    """The expected number of drawn items in the group that gets the most.

    `drawn` of all items are drawn uniformly without replacement; `groups` has sizes, with the number of
    groups of each. The counts X_g are independent binomials (size, drawn / all), given their sum S, so that
    P(max <= x) = prod_g P(X_g <= x) * P(S = drawn | all X_g <= x) / P(S = drawn), and the result is
    sum_{x >= 0} P(max > x). Above `FEW` drawn items, the two probabilities of the sum are taken from normal
    distributions of the same mean and variance, which changes the result by about 1%; below, numbers between
    whole ones are interpolated.

    Example:
        >>> round(expected_largest_share(((32, 8),), 8), 2)
        2.56
    """
    everything = sum(size * count for size, count in groups)
    number = sum(count for _, count in groups)
    biggest = max(size for size, _ in groups)
    if drawn >= everything:
        return biggest
    if drawn <= FEW and drawn != int(drawn):
        below, part = math.floor(drawn), drawn - math.floor(drawn)
        bounds = (expected_largest_share(groups, below), expected_largest_share(groups, below + 1))
        return bounds[0] + part * (bounds[1] - bounds[0])
    if drawn == 0:
        return 0.0
    least = math.ceil(drawn / number)
    most = min(biggest, math.ceil(drawn))
    chance = drawn / everything
    counts = tuple((_Binomial(size, chance, least), count) for size, count in groups)
    up_to = _exactly if drawn <= FEW else _nearly
    expected = float(least)
    for x in range(least, most):
        above = 1 - min(1.0, up_to(counts, x, drawn))
        expected += above
        if above < 1e-6:
            break
    return expected


class _Binomial:
    """A binomial distribution, with the moments of its values up to x, for growing x."""

    WIDE = 12
    """Values by more standard deviations below the mean are not counted."""

    def __init__(self, size: int, chance: float, least: int) -> None:
        self.size, self.chance = size, chance
        self.mean, self.variance = size * chance, size * chance * (1 - chance)
        self.next = max(0, min(least, int(self.mean - self.WIDE * math.sqrt(self.variance))))
        self.total = self.first = self.second = 0.0

    def at(self, value: int) -> float:
        """The probability of `value`."""
        n, k = self.size, value
        if k > n:
            return 0.0
        log_ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(log_ways + k * math.log(self.chance) + (n - k) * math.log1p(-self.chance))

    def up_to(self, x: int) -> tuple[float, float, float]:
        """The probability of at most `x`, and mean and variance given that."""
        while self.next <= x:
            weight, distance = self.at(self.next), self.next - self.mean
            self.total += weight
            self.first += weight * distance
            self.second += weight * distance**2
            self.next += 1
        shift = self.first / self.total
        return self.total, self.mean + shift, self.second / self.total - shift**2


_Counts = tuple[tuple[_Binomial, int], ...]


def _nearly(counts: _Counts, x: int, drawn: float) -> float:
    """P(max <= x), with normal distributions of the sum."""
    log_all, mean, variance, free = 0.0, 0.0, 0.0, 0.0
    for binomial, count in counts:
        total, center, spread = binomial.up_to(x)
        log_all += count * math.log(total)
        mean, variance = mean + count * center, variance + count * spread
        free += count * binomial.variance
    if variance <= 0:
        return 0.0
    return math.exp(log_all + math.log(free / variance) / 2 - (drawn - mean) ** 2 / (2 * variance))


def _exactly(counts: _Counts, x: int, drawn: float) -> float:
    """P(max <= x), from the distribution of the sum itself."""
    return _sum_is(counts, x, int(drawn)) / _sum_is(counts, int(drawn), int(drawn))


def _sum_is(counts: _Counts, x: int, drawn: int) -> float:
    """The probability that all counts are at most `x` and their sum is `drawn`."""

    def times(a: list[float], b: list[float]) -> list[float]:
        return [sum(a[i] * b[n - i] for i in range(n + 1)) for n in range(drawn + 1)]

    product = [1.0] + [0.0] * drawn
    for binomial, count in counts:
        power = [binomial.at(value) if value <= x else 0.0 for value in range(drawn + 1)]
        while count:
            if count & 1:
                product = times(product, power)
            power, count = times(power, power), count >> 1
    return product[drawn]


def roofline_time(work: LayerWork, rates: DeviceRates) -> RooflineTime:
    """The roofline time of `work`: the larger of its memory and compute times at `rates`."""
    memory, compute = work.bytes / rates.bandwidth, work.flops / rates.flops
    return RooflineTime(memory, "memory") if memory >= compute else RooflineTime(compute, "compute")


_UNITS = {
    "fp4": ("fp4_flops", "fp8_flops", "bf16_flops"),
    "fp8": ("fp8_flops", "bf16_flops"),
    "bf16": ("bf16_flops",),
}
_LOWEST = {"fp8_flops": 89, "fp4_flops": 100}
"""Lowest CUDA compute capability with the matrix unit."""
_WITH_UNIT = {
    "fp8_flops": frozenset({"gfx942", "gfx950", "gfx1200", "gfx1201", "gfx1250"}),
    "fp4_flops": frozenset({"gfx950", "gfx1250"}),
}
"""ROCm architectures with the matrix unit."""


def published_rates(device: Device, act: str) -> DeviceRates:
    """Published peak rates of `device`, with the fastest matrix rate for `act` activations.

    Activations use the narrowest matrix unit that supports them and that the device has. Unpublished rates
    are 0.
    """
    for unit in _UNITS.get(number_format(act).grid.matrix_unit, ()):
        if _has_unit(device, unit):
            return DeviceRates(
                device.bandwidth, float(getattr(device, unit)), f"published, {unit[:-6]} matrix rate"
            )
    return DeviceRates(device.bandwidth, 0.0, "published")


def _has_unit(device: Device, unit: str) -> bool:
    """True when the device has the matrix unit, even if its rate is unknown."""
    if getattr(device, unit) or unit not in _LOWEST:
        return True
    if device.platform == "cuda":
        return device.capability >= _LOWEST[unit]
    return device.arch in _WITH_UNIT[unit]


def known_roofline(work: LayerWork, rates: DeviceRates, needs_compute: bool = False) -> RooflineTime | None:
    """`roofline_time` for rates that may be unknown (0); None if there is no bound.

    Without a matrix rate the memory time is still a lower bound, unless `needs_compute`.
    """
    if not rates.bandwidth or (needs_compute and not rates.flops):
        return None
    if not rates.flops:
        return RooflineTime(work.bytes / rates.bandwidth, "memory")
    return roofline_time(work, rates)
