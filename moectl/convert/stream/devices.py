"""Devices on which batches are converted: the host, or a CUDA device with overlapped copies."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

from ...errors import Unavailable, UsageError
from ...lazy_torch import Tensor, torch
from ...whole_numbers import whole_number
from .pipeline import PipelineSlot
from .source_reader import Piece

HUGE_PAGE = 2 << 20
"""Size of a huge page in bytes; smaller buffers are allocated as usual."""

Convert = Callable[[Tensor, Tensor, Tensor], list[Piece]]
"""Converts a slot's first buffer (the bytes read) by way of the second to pieces of the third."""


@dataclass(frozen=True)
class BufferExtent:
    """Number of bytes of a slot's buffers that a batch uses."""

    read: int
    written: int


def memory(size: int) -> Tensor:
    """A uint8 host tensor of `size` bytes, in huge pages if possible (faster to fault in and to pin)."""
    if size < HUGE_PAGE:
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size)
    with suppress(AttributeError, OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


class ConversionDevice(AbstractContextManager["ConversionDevice"], Protocol):
    """Converts batches in pipeline slots."""

    def slot(self, read: int, canonical: int, written: int) -> PipelineSlot:
        """A slot with host buffers of these sizes in bytes."""

    def run(
        self, slot: PipelineSlot, used: BufferExtent, convert: Convert
    ) -> tuple[list[Piece], Callable[[], None]]:
        """The converted pieces on the host, and a function that blocks until their bytes are valid."""


class HostMemory(AbstractContextManager["HostMemory"]):
    """Converts on the CPU, in the slot's host buffers."""

    def slot(self, read: int, canonical: int, written: int) -> PipelineSlot:
        buffers = [memory(size) for size in (read, canonical, written)]
        return PipelineSlot(buffers[0], buffers[1], buffers[2])

    def run(
        self, slot: PipelineSlot, used: BufferExtent, convert: Convert
    ) -> tuple[list[Piece], Callable[[], None]]:
        return convert(slot.read, slot.canonical, slot.written), lambda: None

    def __exit__(self, *error: object) -> None:
        return None


@dataclass(frozen=True)
class _DeviceBuffers:
    """A slot's buffers on the device, and the stream that uses them."""

    stream: torch.cuda.Stream
    read: Tensor
    canonical: Tensor
    written: Tensor


class CudaDevice(AbstractContextManager["CudaDevice"]):
    """A CUDA device; each slot has its own stream, so that copies in both directions overlap with compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, _DeviceBuffers] = {}
        self._pinned: list[Tensor] = []

    def slot(self, read: int, canonical: int, written: int) -> PipelineSlot:
        with torch.cuda.device(self._device):
            host = [self._pin(memory(size)) for size in (read, written)]
        slot = PipelineSlot(host[0], torch.empty(0, dtype=torch.uint8), host[1])
        try:
            sizes = (read, canonical, written)
            on_device = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in sizes]
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._buffers[id(slot)] = _DeviceBuffers(stream, *on_device)
        except torch.OutOfMemoryError as error:
            raise Unavailable(
                f"{self._device} has no room for batches of {read + canonical + written} bytes.",
                hint="Free memory there, give a smaller --max-memory, or --device cpu.",
            ) from error
        return slot

    def _pin(self, t: Tensor) -> Tensor:
        """Pins the pages of `t`, for asynchronous copies, and returns it.

        They are registered with CUDA, since torch rounds pinned allocations up to powers of two. If that
        fails, copies are only slower.
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if t.numel() and int(runtime.cudaHostRegister(t.data_ptr(), t.numel(), 0)) == 0:
            self._pinned.append(t)
        return t

    def run(
        self, slot: PipelineSlot, used: BufferExtent, convert: Convert
    ) -> tuple[list[Piece], Callable[[], None]]:
        buffers = self._buffers[id(slot)]
        with torch.cuda.device(self._device), torch.cuda.stream(buffers.stream):
            buffers.read[: used.read].copy_(slot.read[: used.read], non_blocking=True)
            converted = convert(buffers.read, buffers.canonical, buffers.written)
            slot.written[: used.written].copy_(buffers.written[: used.written], non_blocking=True)
            pieces = [self._on_host(piece, buffers.written, slot.written) for piece in converted]
            finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
            finished.record(buffers.stream)
        return pieces, finished.synchronize

    @staticmethod
    def _on_host(piece: Piece, buffer: Tensor, host: Tensor) -> Piece:
        """The piece in the `host` copy of `buffer`; one outside of `buffer` is copied by itself."""
        data = piece.data
        offset = data.data_ptr() - buffer.data_ptr()
        nbytes = data.numel() * data.element_size()
        if not 0 <= offset <= offset + nbytes <= buffer.numel():
            return replace(piece, data=data.cpu())
        return replace(piece, data=host[offset : offset + nbytes])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize(self._device)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for t in self._pinned:
            runtime.cudaHostUnregister(t.data_ptr())
        self._pinned.clear()
        self._buffers.clear()


def device_named(name: str) -> ConversionDevice:
    """The device called ``cpu``, ``cuda``, ``cuda:1`` or ``auto`` (a GPU if there is one).

    Raises UsageError for any other name, Unavailable if there is no such GPU.
    """
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda", "auto") or (number and (kind != "cuda" or whole_number(number) is None)):
        raise UsageError(f"--device must be cpu, cuda, cuda:N or auto, got {name!r}.")
    count = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return HostMemory()
    if int(number or 0) >= count:
        raise Unavailable(
            f"there is no GPU for --device {name}; {count} can be used.", hint="Give --device cpu."
        )
    return CudaDevice(torch.device("cuda", int(number or 0)))
