"""Where batches are converted: in the host's memory, or on a CUDA device beside it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import Unavailable, UsageError
from .pipeline import PipelineSlot
from .source_reader import Piece

LARGE_PAGE = 2 << 20

Convert = Callable[[Tensor, Tensor, Tensor], list[Piece]]
"""From the buffers of a slot, what was read in the first, to pieces that lie in the last."""


@dataclass(frozen=True)
class BufferExtent:
    """Bytes of a slot's buffers that a batch uses."""

    read: int
    written: int


def memory(size: int) -> Tensor:
    """`size` bytes of the host in large pages where there are any: quicker to touch first, and to pin."""
    if size < LARGE_PAGE:
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size)
    with suppress(AttributeError, OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


class ConversionDevice(AbstractContextManager["ConversionDevice"], Protocol):
    """A place to convert batches."""

    def slot(self, read: int, made: int, written: int) -> PipelineSlot:
        """A slot with buffers of so many bytes on the host."""

    def run(
        self, slot: PipelineSlot, used: BufferExtent, convert: Convert
    ) -> tuple[list[Piece], Callable[[], None]]:
        """The pieces on the host, and a function that returns when their bytes are there."""


class HostMemory(AbstractContextManager["HostMemory"]):
    """The host's own memory."""

    def slot(self, read: int, made: int, written: int) -> PipelineSlot:
        buffers = [memory(size) for size in (read, made, written)]
        return PipelineSlot(buffers[0], buffers[1], buffers[2])

    def run(
        self, slot: PipelineSlot, used: BufferExtent, convert: Convert
    ) -> tuple[list[Piece], Callable[[], None]]:
        return convert(slot.read, slot.made, slot.written), lambda: None

    def __exit__(self, *error: object) -> None:
        return None


@dataclass(frozen=True)
class _Beside:
    """What a slot has on the device: buffers like its own, and a stream in which they are used."""

    stream: torch.cuda.Stream
    read: Tensor
    made: Tensor
    written: Tensor


class CudaDevice(AbstractContextManager["CudaDevice"]):
    """A CUDA device; every slot has a stream, so that copies both ways and the work overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: dict[int, _Beside] = {}
        self._pinned: list[Tensor] = []

    def slot(self, read: int, made: int, written: int) -> PipelineSlot:
        with torch.cuda.device(self._device):
            host = [self._pin(memory(size)) for size in (read, written)]
        slot = PipelineSlot(host[0], torch.empty(0, dtype=torch.uint8), host[1])
        try:
            own = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in (read, made, written)]
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._beside[id(slot)] = _Beside(stream, own[0], own[1], own[2])
        except torch.OutOfMemoryError as error:
            raise Unavailable(
                f"{self._device} has no room for batches of {read + made + written} bytes.",
                hint="Free memory there, give a smaller --max-memory, or --device cpu.",
            ) from error
        return slot

    def _pin(self, t: Tensor) -> Tensor:
        """`t` with its pages held in place: the device copies from and to them by itself.

        Registered, since torch's own pinned memory comes in powers of two. Where the system refuses,
        copies are slower and right all the same.
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if t.numel() and int(runtime.cudaHostRegister(t.data_ptr(), t.numel(), 0)) == 0:
            self._pinned.append(t)
        return t

    def run(
        self, slot: PipelineSlot, used: BufferExtent, convert: Convert
    ) -> tuple[list[Piece], Callable[[], None]]:
        beside = self._beside[id(slot)]
        with torch.cuda.device(self._device), torch.cuda.stream(beside.stream):
            beside.read[: used.read].copy_(slot.read[: used.read], non_blocking=True)
            made = convert(beside.read, beside.made, beside.written)
            slot.written[: used.written].copy_(beside.written[: used.written], non_blocking=True)
            pieces = [self._on_host(piece, beside.written, slot.written) for piece in made]
            finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
            finished.record(beside.stream)
        return pieces, finished.synchronize

    @staticmethod
    def _on_host(piece: Piece, buffer: Tensor, host: Tensor) -> Piece:
        """The piece where the buffer is copied to; one that lies elsewhere is copied by itself."""
        data = piece.data
        at = data.data_ptr() - buffer.data_ptr()
        nbytes = data.numel() * data.element_size()
        if not 0 <= at <= at + nbytes <= buffer.numel():
            return replace(piece, data=data.cpu())
        return replace(piece, data=host[at : at + nbytes])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize(self._device)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for t in self._pinned:
            runtime.cudaHostUnregister(t.data_ptr())
        self._pinned.clear()
        self._beside.clear()


def device_named(name: str) -> ConversionDevice:
    """The device that ``cpu``, ``cuda``, ``cuda:1`` or ``auto`` (a GPU if there is one) names.

    Raises UsageError for another name, Unavailable when there is no such GPU.
    """
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda", "auto") or (number and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"--device must be cpu, cuda, cuda:N or auto, got {name!r}.")
    count = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return HostMemory()
    if int(number or 0) >= count:
        raise Unavailable(
            f"there is no GPU for --device {name}; {count} can be used.", hint="Give --device cpu."
        )
    return CudaDevice(torch.device("cuda", int(number or 0)))
