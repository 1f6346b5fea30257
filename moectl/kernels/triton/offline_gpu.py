"""A GPU that is not in this machine, for which kernels are compiled without running them.

Inside `standing_in` the ordinary host code runs on tensors of the device ``meta`` (shapes without memory),
and chooses launches, constants and options as on the GPU.
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

from ...environment import Device
from ...errors import UsageError
from ..choice.tile_family import SHARED_KIB


@dataclass(frozen=True, slots=True)
class OfflineGpu:
    """A GPU to compile for.

    Attributes:
        arch: ten times the compute capability: 90 is sm_90.
        sms: number of multiprocessors.
        shared: most bytes of shared memory that a program may have.
        name: the name that the driver reports, by which tuned launches are found; may be empty.
    """

    arch: int
    sms: int
    shared: int
    name: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, major and minor."""
        return divmod(self.arch, 10)

    @staticmethod
    def of(device: Device) -> OfflineGpu:
        """The GPU with a device's architecture, size and name; UsageError for other devices than CUDA's."""
        shared = SHARED_KIB.get(device.capability)
        if shared is None:
            choices = ", ".join(f"sm{arch}" for arch in SHARED_KIB)
            raise UsageError(
                f"moectl has no kernels for {device.name} ({device.arch})", hint=f"choose a GPU of {choices}"
            )
        return OfflineGpu(device.capability, device.sms, shared << 10, device.name)

    @staticmethod
    def present(device: torch.device) -> OfflineGpu:
        """The GPU `device` of this machine."""
        about = torch.cuda.get_device_properties(device)
        arch = 10 * about.major + about.minor
        shared = getattr(about, "shared_memory_per_block_optin", SHARED_KIB.get(arch, 99) << 10)
        return OfflineGpu(arch, about.multi_processor_count, shared, about.name)


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
def standing_in(gpu: OfflineGpu) -> Iterator[None]:
    """A context in which torch's and Triton's questions about the GPU are answered for `gpu`.

    It replaces functions of both globally, and is not for threads or for processes that use a GPU. Raises
    UsageError under Triton's interpreter, which compiles nothing.
    """
    if triton.knobs.runtime.interpret:
        raise UsageError("kernels are interpreted, not compiled", hint="unset TRITON_INTERPRET")
    major, minor = gpu.capability
    name = gpu.name or f"stand-in for sm_{gpu.arch}"
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=gpu.sms,
        shared_memory_per_block_optin=gpu.shared,
        name=name,
    )
    with ExitStack() as stack:
        # Not set_active: without a GPU there is no driver to restore.
        for owner, attribute, value in (
            (triton.runtime.driver, "_active", _Driver(gpu)),
            (torch.cuda, "get_device_capability", lambda device=None: gpu.capability),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_device_name", lambda device=None: name),
            (torch.cuda, "current_device", lambda: 0),
        ):
            stack.enter_context(patch.object(owner, attribute, value))
        yield
