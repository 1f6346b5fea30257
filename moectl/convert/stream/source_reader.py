"""Reading of source files by offset, incremental hashes of their tensors, and pieces of output tensors."""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ...files.folder_handle import FolderHandle
from ...files.safe_reading import read_exactly
from ...files.safetensors_writer import nbytes
from ...lazy_torch import torch
from ...torch_dtypes import TORCH_DTYPES


class FolderReader(AbstractContextManager["FolderReader"]):
    """Reads the files of a directory by offset; each is opened once, for reading only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: FolderHandle | None = None
        self._open: dict[str, int] = {}

    def fd(self, name: str) -> int:
        """The read-only descriptor of a file in the directory; CheckpointError as `FolderHandle.open`."""
        if name not in self._open:
            if self._handle is None:
                self._handle = FolderHandle(self._folder)
            self._open[name] = self._handle.open(name, str(self._folder / name))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._open[name], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._open[name]

    def read(self, name: str, view: memoryview, offset: int) -> None:
        """Fills `view` from `offset` of the file; CheckpointError if the file is too short."""
        read_exactly(self.fd(name), view, offset, name)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class Digests:
    """SHA-256 of tensors whose bytes arrive in order, piece by piece."""

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}
        self._done: dict[str, str] = {}

    def update(self, name: str, view: memoryview, *, last: bool) -> None:
        """Adds the next bytes of tensor `name`; `last` if no more follow."""
        digest = self._running.setdefault(name, hashlib.sha256())
        digest.update(view)
        if last:
            self._done[name] = self._running.pop(name).hexdigest()

    def __getitem__(self, name: str) -> str:
        return self._done[name]

    def __contains__(self, name: str) -> bool:
        """True if all bytes of tensor `name` have been added."""
        return name in self._done


def as_tensor(buffer: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of the first bytes of a uint8 `buffer` as a tensor."""
    return buffer[: nbytes(dtype, shape)].view(TORCH_DTYPES[dtype]).reshape(shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, for reading or writing; RuntimeError if it is not contiguous."""
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a stored tensor: the tensor's name, the offset in bytes, and the data."""

    name: str
    at: int
    data: torch.Tensor


def spans(experts: int, batch: int) -> list[tuple[int, int]]:
    """Ranges of at most `batch` experts, first and last (exclusive).

    Example:
        >>> spans(5, 2)
        [(0, 2), (2, 4), (4, 5)]
    """
    return [(first, min(first + batch, experts)) for first in range(0, experts, batch)]
