"""Compiles what launches need in processes that do not use the GPU, before anything is timed."""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.runner import ActivationFormat
from moectl.kernels.triton.layer_binaries import Binary, recording
from moectl.kernels.triton.offline_gpu import OfflineGpu, standing_in
from moectl.kernels.triton.triton_runner import run_with
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import MoEProblem
from moectl.torch_dtypes import MODEL_TORCH_DTYPES
from moectl.tuning.gpu_bench import BACKEND


@dataclass(frozen=True)
class LaunchedCell:
    """A launch of a layer at a number of tokens."""

    problem: MoEProblem
    tokens: int
    launch: Launch

    def binaries(self) -> list[Binary]:
        """What it compiles; inside `standing_in`."""
        layer = empty_layer(self.problem, BACKEND)
        problem, tokens = layer.problem, self.tokens

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        ids = empty(tokens, problem.top_k, dtype=torch.int32)
        weights = empty(tokens, problem.top_k, dtype=torch.float32)
        x = empty(tokens, problem.dims.hidden, dtype=MODEL_TORCH_DTYPES[problem.dtype])
        with recording() as launched:
            run_with(layer, x, ids, weights, self.launch)
        return [it.binary(ActivationFormat.STANDARD, tokens) for it in launched]


def _compile(task: tuple[OfflineGpu, list[LaunchedCell], float]) -> tuple[int, list[str]]:
    """Compiles what the cells need; how many binaries, and what failed."""
    gpu, cells, deadline = task
    torch.set_num_threads(1)
    done, failed = set(), []
    with standing_in(gpu):
        for cell in cells:
            if time.time() > deadline:
                break
            try:
                for binary in cell.binaries():
                    if binary.key not in done:
                        done.add(binary.key)
                        if not binary.cached:
                            binary.compile()
            except Exception as error:
                failed.append(f"{cell.launch.family}: {type(error).__name__} {str(error)[:160]}")
    return len(done), failed


def compile_launches(cells: Iterable[LaunchedCell], gpu: OfflineGpu, jobs: int, limit: float) -> str:
    """Compiles in `jobs` processes, each with the launches that share kernels, for at most `limit` seconds.

    Prints the first failures; returns a phrase on how many binaries there were.
    """
    alike: dict[Any, list[LaunchedCell]] = defaultdict(list)
    for cell in dict.fromkeys(cells):
        alike[cell.problem.scheme, cell.launch].append(cell)
    deadline = time.time() + limit
    tasks = [(gpu, each, deadline) for each in sorted(alike.values(), key=len, reverse=True)]
    with multiprocessing.get_context("forkserver").Pool(jobs) as pool:
        results = list(pool.imap_unordered(_compile, tasks, chunksize=1))
    failed = [line for _, lines in results for line in lines]
    print(*failed[:10], sep="\n", end="\n" if failed else "")
    return f"{sum(count for count, _ in results)} binaries, {len(failed)} failed"
