"""NVIDIA's management library (NVML) through nvidia-ml-py: the driver's GPUs, and a GPU's clocks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .named_devices import memory_bandwidth
from .nvidia_listing import DriverListing, ListedGpu, ListedSlice, NoAnswer, one_line

CORES = {
    (7, 0): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (12, 0): 128,
    (12, 1): 128,
}
"""CUDA cores of a multiprocessor, by compute capability."""


def library() -> Any | None:
    """The module `pynvml` of nvidia-ml-py; None if it is not installed or another module of that name."""
    try:
        module = importlib.import_module("pynvml")
    except Exception:
        return None
    return module if hasattr(module, "nvmlInit") and hasattr(module, "NVMLError") else None


@contextmanager
def initialized() -> Iterator[Any | None]:
    """The initialized library; None without it or without the driver's libnvidia-ml.

    Raises the library's NVMLError if the driver cannot be reached.
    """
    nvml = library()
    if nvml is None:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        yield None
        return
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def listing() -> DriverListing | None:
    """What NVML lists; None without the library. NoAnswer, with its words, if it fails or lists no GPU."""
    nvml = library()
    if nvml is None:
        return None
    try:
        with initialized() as nvml_now:
            return None if nvml_now is None else _listing(nvml_now)
    except nvml.NVMLError as error:
        raise NoAnswer(f"NVML: {one_line(str(error))}") from error


def _listing(nvml: Any) -> DriverListing:
    gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    if not gpus:
        raise NoAnswer("NVML lists no GPU")
    driver = _text(value_or(nvml, "", nvml.nvmlSystemGetDriverVersion))
    version = int(value_or(nvml, 0, nvml.nvmlSystemGetCudaDriverVersion))
    cuda = f"{version // 1000}.{version % 1000 // 10}" if version else ""
    return DriverListing(gpus, driver, cuda)


def _gpu(nvml: Any, index: int) -> ListedGpu:
    """The GPU with a number; one that the driver cannot use has its words as `failure`."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        uuid, name = (_text(ask(handle)) for ask in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName))
    except nvml.NVMLError as error:
        return ListedGpu(str(index), "", "unknown GPU", "sm0", 0, failure=f"NVML: {one_line(str(error))}")
    memory = value_or(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    nbytes = int(memory.total) >> 20 << 20 if memory is not None else 0
    current, _ = value_or(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)
    slices = tuple(_slices(nvml, handle)) if current else ()
    cores = value_or(nvml, 0, nvml.nvmlDeviceGetNumGpuCores, handle)
    clock = value_or(nvml, 0, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM)
    width = value_or(nvml, 0, nvml.nvmlDeviceGetMemoryBusWidth, handle)
    return ListedGpu(
        str(index),
        uuid,
        name,
        f"sm{major}{minor}",
        nbytes,
        bool(current),
        slices,
        sms=cores // CORES[major, minor] if (major, minor) in CORES else 0,
        bandwidth=memory_bandwidth(clock, width),
    )


def _slices(nvml: Any, gpu: Any) -> Iterator[ListedSlice]:
    for number in range(value_or(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, gpu)):
        with suppress(nvml.NVMLError):
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
            profile = _text(nvml.nvmlDeviceGetName(part)).rpartition("MIG ")[2]
            yield ListedSlice(profile, _text(nvml.nvmlDeviceGetUUID(part)))


def board_of(nvml: Any, uuid: str) -> Any:
    """The handle of the GPU with `uuid`, or of that to which the MIG slice `uuid` belongs.

    Raises NVMLError for an unknown UUID.
    """
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return handle


def value_or(nvml: Any, default: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `ask`; `default` if the driver does not report it."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    """A text of NVML, which old bindings return as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
