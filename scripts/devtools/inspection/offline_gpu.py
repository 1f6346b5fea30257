"""Compiling kernels for a GPU that is not in this machine, without running them.

Inside `compiling_for` the ordinary host code runs, on tensors of the device ``meta`` (shapes without memory),
and every launch compiles exactly the kernel that it would run on the GPU, with the same constants,
specializations and options. `OfflineGpu` answers queries of the GPU's properties.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moectl.errors import UsageError


@dataclass(frozen=True, slots=True)
class OfflineGpu:
    """A GPU to compile for.

    Attributes:
        arch: ten times the compute capability: 90 is sm_90.
        sms: number of multiprocessors.
        shared: most bytes of shared memory that a program may have.
    """

    arch: int
    sms: int
    shared: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, major and minor."""
        return divmod(self.arch, 10)


OFFLINE_GPUS = {
    gpu.arch: gpu
    for gpu in (
        OfflineGpu(80, 108, 163 << 10),
        OfflineGpu(89, 128, 99 << 10),
        OfflineGpu(90, 132, 227 << 10),
        OfflineGpu(100, 148, 227 << 10),
        OfflineGpu(120, 170, 99 << 10),
    )
}
"""One GPU of each architecture: A100, RTX 4090, H200, B200, RTX 5090."""


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A launched kernel: the name of its function, and Triton's compiled kernel."""

    name: str
    kernel: Any


@dataclass
class _Driver:
    """A Triton driver that only names the target and cannot launch."""

    gpu: OfflineGpu
    utils: Any = field(init=False)

    def __post_init__(self) -> None:
        properties = {"multiprocessor_count": self.gpu.sms, "max_shared_mem": self.gpu.shared, "warpSize": 32}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.arch, 32)

    def get_current_device(self) -> int:
        # Triton caches kernels by device, so each architecture needs its own number.
        return self.gpu.arch

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling_for(gpu: OfflineGpu) -> Iterator[list[LaunchedKernel]]:
    """A context in which launches compile for `gpu`; yields the list to which they are appended.

    Not thread-safe: it replaces Triton's driver and torch's queries of the GPU globally. Raises UsageError
    under Triton's interpreter, which compiles nothing.
    """
    if triton.knobs.runtime.interpret:
        raise UsageError("kernels are interpreted, not compiled", hint="unset TRITON_INTERPRET")
    launched: list[LaunchedKernel] = []
    plain_run = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = plain_run(kernel, *args, grid=grid, warmup=True, **options)
        launched.append(LaunchedKernel(kernel.fn.__name__, compiled))
        return compiled

    major, minor = gpu.capability
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=gpu.sms,
        shared_memory_per_block_optin=gpu.shared,
        name=f"stand-in for sm_{gpu.arch}",
    )
    with ExitStack() as stack:
        # Not set_active: without a GPU there is no driver to restore.
        for owner, name, value in (
            (triton.runtime.driver, "_active", _Driver(gpu)),
            (JITFunction, "run", run),
            (torch.cuda, "get_device_capability", lambda device=None: gpu.capability),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "current_device", lambda: 0),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield launched
