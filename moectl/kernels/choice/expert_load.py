"""How many tokens an expert gets, and into how many tiles they are split, on average over routings."""

from __future__ import annotations

import math
from functools import lru_cache

POINTS = 48
"""Numbers of tokens of an expert over which expectations are taken."""


def expert_counts(experts: int, top_k: int, tokens: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Numbers of tokens, one or more, that an expert may get of `tokens`, and their probabilities.

    Each token takes `top_k` of `experts` at random: a binomial distribution, sampled where it is wide.

    Example:
        >>> expert_counts(experts=4, top_k=1, tokens=1)
        ((1,), (0.25,))
    """
    share = min(top_k, experts) / experts
    if share >= 1:
        return (tokens,), (1.0,)
    mean, deviation = tokens * share, math.sqrt(tokens * share * (1 - share))
    if mean + 5 * deviation > POINTS:
        steps = [8 * i / (POINTS - 1) - 4 for i in range(POINTS)]
        weights = [math.exp(-step * step / 2) for step in steps]
        total = sum(weights)
        counts = tuple(min(tokens, round(mean + deviation * step)) for step in steps)
        return counts, tuple(weight / total for weight in weights)
    chance, chances = (1 - share) ** tokens, []
    for count in range(1, min(tokens, POINTS) + 1):
        chance *= (tokens - count + 1) / count * share / (1 - share)
        chances.append(chance)
    return tuple(range(1, len(chances) + 1)), tuple(chances)


@lru_cache(maxsize=1 << 14)
def token_tiles_of(tokens: int, widths: tuple[int, ...], even: bool) -> tuple[int, int]:
    """Token tiles of an expert with `tokens` tokens, and the sum of their widths; see `LaunchShape`.

    Example:
        >>> token_tiles_of(70, (16, 32, 64), even=False)
        (2, 80)
    """
    if not widths:
        return tokens, tokens
    most = widths[-1]
    tiles = math.ceil(tokens / most)
    if even:
        each = 16 * math.ceil(math.ceil(tokens / 16) / tiles)
        return tiles, tiles * next(width for width in widths if width >= each)
    rest = tokens - (tiles - 1) * most
    return tiles, (tiles - 1) * most + next(width for width in widths if width >= rest)


class ExpertLoad:
    """The expected load of a rank's experts for one number of tokens.

    Attributes:
        active: experts with at least one token.
        busy: probability that there is any, of one token if there are none.
    """

    def __init__(self, experts: int, local_experts: int, top_k: int, tokens: int) -> None:
        self._local = local_experts
        self._counts, self._chances = expert_counts(experts, top_k, tokens)
        self.active = local_experts * sum(self._chances)
        others = experts - local_experts
        none = math.prod(max(0, others - i) / (experts - i) for i in range(min(top_k, experts)))
        self.busy = 1 - none ** max(tokens, 1)
        self._tiles: dict[tuple[tuple[int, ...], bool], tuple[float, float]] = {}

    def tiles(self, widths: tuple[int, ...], even: bool) -> tuple[float, float]:
        """Token tiles of all experts, and the average width of one."""
        key = widths, even
        if key not in self._tiles:
            number = width = 0.0
            for count, chance in zip(self._counts, self._chances, strict=True):
                tiles, wide = token_tiles_of(count, widths, even)
                number += chance * tiles
                width += chance * wide
            self._tiles[key] = self._local * number, width / max(number, 1e-9)
        return self._tiles[key]
