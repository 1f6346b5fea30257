"""The launches of a layer on a GPU for any number of tokens, and their compiled kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_table import tokens_per_expert
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.runner import Run
from moectl.kernels.triton.offline_gpu import OfflineGpu
from moectl.kernels.triton.triton_runner import FAMILIES, choose_shipped, run_with

from .kernel_report import KernelReport, report_of
from .offline_gpu import compiling_for

TOKENS = (1, 2, 3, 4, *(n for i in range(3, 17) for n in (3 << (i - 2), 1 << i)))
"""Numbers of tokens to examine: two for every doubling, up to 65,536."""


@dataclass(frozen=True)
class Examined:
    """A launch of a layer on a GPU, and the numbers of tokens of `TOKENS` that use it."""

    launch: Launch
    tokens: tuple[int, ...]


def shipped(layer: PreparedMoE, gpu: OfflineGpu) -> tuple[Examined, ...]:
    """Every launch that `layer` takes on `gpu`."""
    selected: dict[Launch, list[int]] = {}
    with compiling_for(gpu):
        for tokens in TOKENS:
            launch = choose_shipped(layer.problem, tokens, torch.device("cuda"))
            selected.setdefault(launch, []).append(tokens)
    return tuple(Examined(launch, tuple(tokens)) for launch, tokens in selected.items())


def candidates(layer: PreparedMoE, gpu: OfflineGpu) -> tuple[Examined, ...]:
    """Every launch that tuning may measure for `layer` on `gpu`, family by family."""
    problem, launches = layer.problem, list[Examined]()
    for name, kernel_family in FAMILIES.items():
        fewest, most = kernel_family.tokens_per_expert
        spreads = {n: tokens_per_expert(problem, n) for n in TOKENS}
        tokens = tuple(n for n, per_expert in spreads.items() if fewest <= per_expert <= most)
        if tokens and kernel_family.capability[0] <= gpu.capability <= kernel_family.capability[1]:
            tiles = [
                tile for tile in kernel_family.candidates(problem) if not kernel_family.fits(problem, tile)
            ]
            launches += [Examined(Launch(name, tile), tokens) for tile in tiles]
    return tuple(launches)


def covering_tiles(tiles: Iterable[Any]) -> list[Any]:
    """A small subset of a kernel family's tiles that has every value of every field (a greedy set cover)."""
    values = {tile: set(asdict(tile).items()) for tile in tiles}
    cover, missing = [], set().union(*values.values())
    while missing:
        best = max(values, key=lambda tile: len(values[tile] & missing))
        cover.append(best)
        missing -= values[best]
    return cover


def inspect(layer: PreparedMoE, tokens: int, launch: Launch, gpu: OfflineGpu) -> tuple[KernelReport, ...]:
    """The kernels of one call of `layer` for `gpu`, in the order of their launches.

    The weights of `layer` are on the device ``meta``. Raises UsageError if the launch is not legal for it,
    and Triton's errors if a kernel does not compile.
    """
    return inspect_run(layer, tokens, gpu, partial(run_with, launch=launch))


def inspect_run(layer: PreparedMoE, tokens: int, gpu: OfflineGpu, run: Run) -> tuple[KernelReport, ...]:
    """The kernels that `run`, for example a runner's `compute`, launches for one call of `layer`."""
    problem = layer.problem
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    x = torch.empty(tokens, problem.dims.hidden, dtype=dtype, device="meta")
    ids = torch.empty(tokens, problem.top_k, dtype=torch.int32, device="meta")
    weights = torch.empty(tokens, problem.top_k, dtype=torch.float32, device="meta")
    with compiling_for(gpu) as launched:
        run(layer, x, ids, weights)
        return tuple(map(report_of, launched))
