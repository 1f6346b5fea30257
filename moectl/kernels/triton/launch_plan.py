"""Which launches a layer takes by the model of time: a few, each for a range of numbers of tokens."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...problem.moe_problem import MoEProblem
from .launch_model import GpuRates, predicted_us
from .launch_shape import LaunchShape
from .launch_table import TokenSpread
from .launches import Launch

MOST_TOKENS = 16384
"""Numbers of tokens up to which launches are compared and, by default, a layer's binaries are compiled; more
take the launch of this one."""

SIZES = tuple(sorted({round(2 ** (half / 2)) for half in range(2 * int(math.log2(MOST_TOKENS)) + 1)}))
"""Numbers of tokens at which launches are compared, two for each power of two."""

MOST_GEMM_BINARIES = 7
"""Compiled GEMMs of a layer over all numbers of tokens. Sorts, plans and sums come in addition: about 14."""

WORTH = 0.004
"""Mean gain of predicted time over all `SIZES` for which another launch is added."""


UNFITTED = 10.0
"""Loss, a logarithm, of a launch where it was not fitted: beyond that of any that was."""


@dataclass(frozen=True)
class FittedLaunch:
    """A launch that a layer may take.

    Attributes:
        launch: the launch.
        shape: what the model of time knows of it.
        tokens_per_expert: where it was fitted: lowest and highest average of active experts.
    """

    launch: Launch
    shape: LaunchShape
    tokens_per_expert: tuple[float, float]

    @property
    def binaries(self) -> int:
        """Compiled GEMMs."""
        return 1 if getattr(self.launch.tile, "fused", 0) else 2


@dataclass(frozen=True)
class Plan:
    """Launches by number of tokens.

    Attributes:
        most: largest number of tokens of each range, in ascending order.
        launches: the launch of each range, and of more tokens.
        us: predicted microseconds at the largest number of tokens of each range.
    """

    most: tuple[int, ...]
    launches: tuple[Launch, ...]
    us: tuple[float, ...]

    def launch(self, tokens: int) -> Launch:
        """The launch for `tokens` tokens."""
        return self.launches[min(bisect_left(self.most, tokens), len(self.most) - 1)]


def plan(problem: MoEProblem, gpu: GpuRates, candidates: Sequence[FittedLaunch]) -> Plan | None:
    """The launches of a layer; None if there is a number of tokens for which no candidate was fitted.

    They are few, within `MOST_GEMM_BINARIES`: those whose fastest is nearest to the fastest of all
    candidates, on average over `SIZES`.
    """
    if not candidates:
        return None
    us = predicted_us(problem, SIZES, [(c.launch.family, c.shape) for c in candidates], gpu)
    spread = [TokenSpread.local(problem, tokens).tokens_per_expert for tokens in SIZES]
    fitted = torch.tensor(
        [[c.tokens_per_expert[0] <= s <= c.tokens_per_expert[1] for c in candidates] for s in spread]
    )
    us = torch.where(fitted, us, math.inf)
    fastest = us.min(1).values
    if not bool(torch.isfinite(fastest).all()):
        return None
    loss = torch.where(fitted, (us / fastest[:, None]).log(), UNFITTED)
    chosen = _chosen(loss, [c.binaries for c in candidates])
    if not chosen or bool((loss[:, chosen].min(1).values >= UNFITTED).any()):
        return None
    picks = [chosen[i] for i in us[:, chosen].argmin(1).tolist()]
    ends = [i for i, pick in enumerate(picks) if i + 1 == len(picks) or picks[i + 1] != pick]
    # Between two sizes the launch of the nearer one is taken.
    most = [
        SIZES[i] if i + 1 == len(SIZES) else max(SIZES[i], int(math.sqrt(SIZES[i] * SIZES[i + 1])))
        for i in ends
    ]
    return Plan(
        tuple(most),
        tuple(candidates[picks[i]].launch for i in ends),
        tuple(float(us[i, picks[i]]) for i in ends),
    )


def _chosen(loss: Tensor, binaries: Sequence[int]) -> list[int]:
    """Columns of `loss` ``[sizes, candidates]`` whose minimum is small on average, within the limit.

    They are added one after another, each the one that gains most, then exchanged while that gains more.
    """
    costs = torch.tensor(binaries)
    chosen: list[int] = []
    while True:
        added = _best_column(loss, chosen, costs)
        if added is None:
            break
        chosen.append(added)
    for _ in range(len(chosen)):
        for i, index in enumerate(chosen):
            others = chosen[:i] + chosen[i + 1 :]
            better = _best_column(loss, others, costs)
            chosen[i] = index if better is None else better
    return chosen


def _best_column(loss: Tensor, chosen: Sequence[int], costs: Tensor) -> int | None:
    """The column that gains most beside those `chosen`; None if none gains `WORTH` within the limit."""
    best = torch.full((len(loss),), 2 * UNFITTED, dtype=loss.dtype)
    if chosen:
        best = loss[:, chosen].min(1).values
    gains = (best[:, None] - torch.minimum(best[:, None], loss)).mean(0)
    gains[int(costs[[*chosen]].sum()) + costs > MOST_GEMM_BINARIES] = 0.0
    index = int(gains.argmax())
    return index if float(gains[index]) >= WORTH else None
