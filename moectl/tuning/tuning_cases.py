"""What is tuned: layers at numbers of tokens, in the order in which it is worth it, and their launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..kernels.triton.launch_table import GpuModel, TokenSpread, distance_to_nearest
from ..kernels.triton.launches import Launch
from ..kernels.triton.triton_runner import FAMILIES
from ..problem.moe_problem import MoEProblem

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens that are tuned unless others are asked for: each row holds to the middle of the next."""


@dataclass(frozen=True)
class TuningCase:
    """One layer, called `name`, at one number of tokens."""

    name: str
    problem: MoEProblem
    tokens: int

    @property
    def tokens_per_expert(self) -> float:
        """Tokens per hit expert."""
        return TokenSpread.here(self.problem, self.tokens).tokens_per_expert

    def __str__(self) -> str:
        return f"{self.name} M={self.tokens}"


def candidates(cell: TuningCase, families: Iterable[str], device: torch.device) -> list[Launch]:
    """Every legal launch that is worth a measurement on a cell."""
    found = []
    for name in families:
        kernel_family = FAMILIES[name]
        fewest, most = kernel_family.tokens_per_expert
        if kernel_family.runs_on(device) and fewest <= cell.tokens_per_expert <= most:
            tiles = kernel_family.candidates(cell.problem)
            found += [Launch(name, tile) for tile in tiles if not kernel_family.fits(cell.problem, tile)]
    return found


def by_expected_gain(cells: Sequence[TuningCase], gpu: GpuModel) -> list[TuningCase]:
    """`cells` with those first of which the shipped table knows least, the fewest tokens first among equals.

    A cell that ships measured can win little; one that takes the row of another layer or another number
    of tokens may run with the wrong kernels. Decode is what a server does most.
    """
    return sorted(cells, key=lambda cell: (-distance_to_nearest(cell.problem, cell.tokens, gpu), cell.tokens))
