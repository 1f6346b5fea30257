"""The launches that a layer can get on a GPU for any number of tokens, and their compiled kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.runner import Run
from moectl.kernels.triton.launch_table import TokenSpread
from moectl.kernels.triton.launches import Launch
from moectl.kernels.triton.triton_runner import FAMILIES, choose_shipped, run_with

from .kernel_report import KernelReport, report_of
from .offline_gpu import OfflineGpu, compiling_for

TOKENS = (1, 2, 3, 4, *(n for i in range(3, 17) for n in (3 << (i - 2), 1 << i)))
"""Numbers of tokens that a layer is looked at with: two for every doubling, up to 65,536."""


@dataclass(frozen=True)
class Examined:
    """A launch of a layer on a GPU, and the numbers of tokens of `TOKENS` that it is for."""

    launch: Launch
    tokens: tuple[int, ...]


def shipped(layer: PreparedMoE, gpu: OfflineGpu) -> tuple[Examined, ...]:
    """Every launch that `layer` takes on `gpu`, by the table that ships with the package."""
    taken: dict[Launch, list[int]] = {}
    with compiling_for(gpu):
        for tokens in TOKENS:
            taken.setdefault(choose_shipped(layer.problem, tokens, torch.device("cuda")), []).append(tokens)
    return tuple(Examined(launch, tuple(tokens)) for launch, tokens in taken.items())


def candidates(layer: PreparedMoE, gpu: OfflineGpu) -> tuple[Examined, ...]:
    """Every launch among which measurements may decide for `layer` on `gpu`, family by family."""
    problem, found = layer.problem, []
    for name, kernel_family in FAMILIES.items():
        fewest, most = kernel_family.tokens_per_expert
        spreads = {n: TokenSpread.local(problem, n).tokens_per_expert for n in TOKENS}
        tokens = tuple(n for n, each in spreads.items() if fewest <= each <= most)
        if tokens and kernel_family.capability[0] <= gpu.capability <= kernel_family.capability[1]:
            tiles = [
                tile for tile in kernel_family.candidates(problem) if not kernel_family.fits(problem, tile)
            ]
            found += [Examined(Launch(name, tile), tokens) for tile in tiles]
    return tuple(found)


def covering_tiles(tiles: Iterable[Any]) -> list[Any]:
    """A small subset of a kernel family's tiles that has every value of every field (a greedy set cover)."""
    left = {tile: set(asdict(tile).items()) for tile in tiles}
    found, missing = [], set().union(*left.values())
    while missing:
        best = max(left, key=lambda tile: len(left[tile] & missing))
        found.append(best)
        missing -= left[best]
    return found


def inspect(layer: PreparedMoE, tokens: int, launch: Launch, gpu: OfflineGpu) -> tuple[KernelReport, ...]:
    """The kernels of one call of `layer` for `gpu`, in the order of their launches.

    `layer` has its weights on the device ``meta``. UsageError when the launch is not legal for it; what
    Triton raises when a kernel does not compile.
    """
    return inspect_run(layer, tokens, gpu, partial(run_with, launch=launch))


def inspect_run(layer: PreparedMoE, tokens: int, gpu: OfflineGpu, run: Run) -> tuple[KernelReport, ...]:
    """The same for whatever `run` launches, a runner's `compute` for one."""
    problem = layer.problem
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    x = torch.empty(tokens, problem.dims.hidden, dtype=dtype, device="meta")
    ids = torch.empty(tokens, problem.top_k, dtype=torch.int32, device="meta")
    weights = torch.empty(tokens, problem.top_k, dtype=torch.float32, device="meta")
    with compiling_for(gpu) as launched:
        run(layer, x, ids, weights)
        return tuple(map(report_of, launched))
