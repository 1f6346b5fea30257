"""Compiling kernels for a GPU that is not in this machine, without running them.

Inside `compiling_for` the ordinary host code runs, on tensors of the device ``meta`` (shapes without memory),
and every launch compiles exactly the kernel that it would run on the GPU, with the same constants,
specializations and options.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from triton.runtime.jit import JITFunction

from moectl.kernels.triton.offline_gpu import OfflineGpu, standing_in

OFFLINE_GPUS = {
    gpu.arch: gpu
    for gpu in (
        OfflineGpu(80, 108, 163 << 10),
        OfflineGpu(86, 72, 99 << 10),
        OfflineGpu(89, 128, 99 << 10),
        OfflineGpu(90, 132, 227 << 10),
        OfflineGpu(100, 148, 227 << 10),
        OfflineGpu(120, 170, 99 << 10),
    )
}
"""One GPU of each architecture: A100, A10, RTX 4090, H200, B200, RTX 5090."""


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A launched kernel: the name of its function, and Triton's compiled kernel."""

    name: str
    kernel: Any


@contextmanager
def compiling_for(gpu: OfflineGpu) -> Iterator[list[LaunchedKernel]]:
    """A context in which launches compile for `gpu`; yields the list to which they are appended.

    Not thread-safe, and refused under Triton's interpreter, see `standing_in`.
    """
    launched: list[LaunchedKernel] = []
    plain_run = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = plain_run(kernel, *args, grid=grid, warmup=True, **options)
        launched.append(LaunchedKernel(kernel.fn.__name__, compiled))
        return compiled

    with standing_in(gpu), patch.object(JITFunction, "run", run):
        yield launched
