"""Canonical batches of experts read from source files, piece by piece, hashed on the way."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from ..checkpoint.shards import open_regular
from .disk import read_exactly
from .safetensors_file import TORCH_DTYPES, nbytes


class FolderReader(AbstractContextManager["FolderReader"]):
    """A folder's files, each opened once and read by offset, never written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def fd(self, name: str) -> int:
        """The descriptor of a file of the folder, opened for reading only."""
        if name not in self._open:
            with open_regular(self._folder / name, str(self._folder / name)) as file:
                self._open[name] = os.dup(file.fileno())
        return self._open[name]

    def read(self, name: str, view: memoryview, offset: int) -> None:
        """Fills `view` from the file; CheckpointError when the file is too short."""
        read_exactly(self.fd(name), view, offset, name)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


class Digests:
    """SHA-256 of tensors whose bytes come in order, piece by piece."""

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}
        self._done: dict[str, str] = {}

    def update(self, name: str, view: memoryview, *, last: bool) -> None:
        """The next bytes of tensor `name`; `last` when no more follow."""
        digest = self._running.setdefault(name, hashlib.sha256())
        digest.update(view)
        if last:
            self._done[name] = self._running.pop(name).hexdigest()

    def __getitem__(self, name: str) -> str:
        return self._done[name]

    def __contains__(self, name: str) -> bool:
        """True when all bytes of tensor `name` were seen."""
        return name in self._done


def as_tensor(buffer: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The first bytes of a uint8 `buffer` as a tensor, nothing copied."""
    return buffer[: nbytes(dtype, shape)].view(TORCH_DTYPES[dtype]).reshape(shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, nothing copied."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


Job = TypeVar("Job", contravariant=True)


class Stages(Protocol[Job]):
    """Three steps of a job: `read` fills a buffer, `work` makes pieces of it, `write` stores them."""

    def read(self, job: Job, source: torch.Tensor) -> None: ...

    def work(self, job: Job, source: torch.Tensor, target: torch.Tensor) -> list[Piece]: ...

    def write(self, job: Job, pieces: list[Piece]) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a stored tensor: the tensor's name, where the run begins in it, bytes, and the run itself."""

    name: str
    at: int
    data: torch.Tensor


class Arena:
    """One block of memory, cut anew for every layer into buffers to read into and to convert into.

    Two of each, so that one batch is read and one written while one is converted. A single block
    that lives as long as the conversion keeps the allocator from piling up what layers leave behind.
    """

    ALIGN = 256

    def __init__(self, nbytes: int) -> None:
        self._block = torch.empty(nbytes, dtype=torch.uint8)

    @classmethod
    def size(cls, read: int, written: int) -> int:
        """Bytes for two buffers of `read` and two of `written` bytes."""
        return sum(2 * math.ceil(n / cls.ALIGN) * cls.ALIGN for n in (read, written))

    def cut(self, read: int, written: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Buffers to read into and to convert into; what was cut before is void."""
        at, buffers = 0, []
        for size in (read, read, written, written):
            buffers.append(self._block[at : at + size])
            at += math.ceil(size / self.ALIGN) * self.ALIGN
        return buffers[:2], buffers[2:]


def run_stages(
    jobs: list[Job],
    stages: Stages[Job],
    buffers: tuple[list[torch.Tensor], list[torch.Tensor]],
    *,
    overlap: bool,
) -> None:
    """Runs the jobs in order; with `overlap`, reading and writing go on beside the work."""
    sources, targets = buffers
    if not overlap or len(jobs) == 1:
        for job in jobs:
            stages.read(job, sources[0])
            stages.write(job, stages.work(job, sources[0], targets[0]))
            release_memory()
        return
    writes: list[Future[None]] = []
    with ThreadPoolExecutor(1) as readers, ThreadPoolExecutor(1) as writers:
        try:
            reading = readers.submit(stages.read, jobs[0], sources[0])
            for i, job in enumerate(jobs):
                reading.result()
                if i + 1 < len(jobs):
                    reading = readers.submit(stages.read, jobs[i + 1], sources[(i + 1) % 2])
                if i >= 2:
                    writes[i - 2].result()
                result = stages.work(job, sources[i % 2], targets[i % 2])
                writes.append(writers.submit(stages.write, job, result))
                release_memory()
            for write in writes:
                write.result()
        finally:
            readers.shutdown(cancel_futures=True)
            writers.shutdown(cancel_futures=True)


def _find_trim() -> Callable[[int], int]:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return lambda pad: 0
    return trim


_trim = _find_trim()


def release_memory() -> None:
    """Gives freed memory back to the system where the C library can.

    glibc keeps large blocks that were freed, so that temporaries of every batch would add up.
    """
    _trim(0)


def spans(experts: int, batch: int) -> list[tuple[int, int]]:
    """Experts cut into runs of at most `batch`: first and last (exclusive) of each."""
    return [(first, min(first + batch, experts)) for first in range(0, experts, batch)]
