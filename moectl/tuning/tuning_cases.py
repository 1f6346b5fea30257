"""Tuning cases (a layer at a number of tokens) in order of expected gain, and their candidate launches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..kernels.choice.launch import Launch
from ..kernels.choice.launch_model import FITTED_CAPABILITY
from ..kernels.choice.launch_table import GpuModel, own_rows, tokens_per_expert
from ..kernels.triton.triton_runner import FAMILIES, predicted_for
from ..problem.moe_problem import MoEProblem

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens that are tuned by default; a row is used up to the midpoint to the next."""

PROMISING = 1.3
"""How much slower than the fastest a launch may be predicted to be for it to be measured: predicted times of
layers that the model was not fitted to are off by 8% (RMS)."""


@dataclass(frozen=True)
class TuningCase:
    """One layer, called `name`, at one number of tokens."""

    name: str
    problem: MoEProblem
    tokens: int

    @property
    def tokens_per_expert(self) -> float:
        """Average tokens of experts that have any."""
        return tokens_per_expert(self.problem, self.tokens)

    def __str__(self) -> str:
        return f"{self.name} M={self.tokens}"


def candidates(cell: TuningCase, families: Iterable[str], device: torch.device) -> list[Launch]:
    """Every legal launch that is worth measuring for `cell`."""
    launches = []
    for name in families:
        kernel_family = FAMILIES[name]
        fewest, most = kernel_family.tokens_per_expert
        few = cell.tokens <= kernel_family.most_tokens(cell.problem)
        if few and kernel_family.runs_on(device) and fewest <= cell.tokens_per_expert <= most:
            launches += [
                Launch(name, tile)
                for tile in kernel_family.candidates(cell.problem)
                if kernel_family.suits(cell.problem, tile, cell.tokens_per_expert)
                and not kernel_family.fits(cell.problem, tile)
            ]
    return launches


def promising(
    cell: TuningCase, launches: Sequence[Launch], device: torch.device, most: int | None = None
) -> list[Launch]:
    """Those of `launches` that may be the fastest of `cell`, by the model of time, the fastest first.

    All of them on GPUs of another architecture than the model was fitted to. Launches whose time it does not
    predict come last, in their order. With `most` there are at most so many.
    """
    us = {launch: predicted_for(cell.problem, cell.tokens, launch, device) or math.inf for launch in launches}
    known = device.type == "cuda" and torch.cuda.get_device_capability(device) == FITTED_CAPABILITY
    limit = PROMISING * min(us.values(), default=math.inf) if known else math.inf
    likely = [launch for launch in us if us[launch] <= limit or math.isinf(us[launch])]
    return sorted(likely, key=us.__getitem__)[:most]


def by_expected_gain(cells: Sequence[TuningCase], gpu: GpuModel) -> list[TuningCase]:
    """`cells` in the order in which they are measured: those that ship measured last, fewest tokens first.

    A cell that ships measured can gain little. Few tokens come first because servers mostly decode.
    """

    def ships(cell: TuningCase) -> bool:
        return any(row.tokens == cell.tokens for row in own_rows(cell.problem, gpu))

    return sorted(cells, key=lambda cell: (ships(cell), cell.tokens))
