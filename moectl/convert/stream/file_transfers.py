"""Byte ranges of files read into tensors on a device, by many threads through pinned buffers.

What bounds the rate: a GPU's link takes 25 GB/s (PCIe 4) or 55 (PCIe 5), but only from pinned memory, and one
thread copies 4 to 10 GB/s out of the page cache. So `THREADS` threads read at once, each into one of its two
pinned buffers while the other is being copied to the device. Python needs the interpreter's lock for about
0.1 ms of each piece, so that pieces have megabytes; all buffers together stay small, since pinning memory
takes 0.3 s for each GB.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path

from ...errors import CheckpointError
from ...files.safe_reading import read_exactly
from ...lazy_torch import Tensor, torch
from .pipeline import usable_cores
from .source_reader import FolderReader, as_bytes

THREADS = 16
"""Most threads that read; beyond the cores they would only wait for one another."""

BUFFER_BYTES = 8 << 20
"""Size of a pinned buffer. Every thread that reads keeps `BUFFERS` of them while the process lives."""

BUFFERS = 2
"""Pinned buffers of a thread: one being filled, one being copied."""

SMALLEST_PIECE = 4 << 20
"""Bytes of a piece below which more pieces cost more than idle threads."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """`size` bytes of `file` from `start`, to be read into the flat uint8 tensor `target` from `at`."""

    file: str
    start: int
    size: int
    target: Tensor
    at: int = 0


def flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as a flat uint8 tensor; RuntimeError if it is not contiguous."""
    return tensor.view(-1).view(torch.uint8)


def transfer(reader: FolderReader, transfers: Iterable[Transfer], device: torch.device) -> None:
    """Fills the targets of `transfers`, which are on `device`, from the reader's files.

    On a GPU the copies come after what the current stream has been given before the call, and that stream
    waits for them before what it is given after. No memory of the device is used besides the targets.
    Transfers that follow one another in a target should do so in `transfers`: they are copied together.

    Raises CheckpointError, naming the file and the offset, if a file is too short or cannot be read; no copy
    is under way any more then.
    """
    every = [item for item in transfers if item.size]
    total = sum(item.size for item in every)
    fds = {file: reader.fd(file) for file in dict.fromkeys(item.file for item in every)}
    pieces = list(_pieces(every, _piece_bytes(total)))
    if device.type != "cpu":
        _Staged(device, fds).run(pieces)
        return
    targets = {id(item.target): item.target for item in every}
    views = {key: as_bytes(target) for key, target in targets.items()}

    def read(piece: list[Transfer]) -> None:
        for item in piece:
            view = views[id(item.target)][item.at : item.at + item.size]
            read_exactly(fds[item.file], view, item.start, item.file)

    if len(pieces) == 1 or _threads() == 1:
        for piece in pieces:
            read(piece)
    else:
        _run_all(read, pieces)


def announce(folder: Path, extents: Iterable[tuple[str, int, int]]) -> Future[None]:
    """Has the system read `extents` (file, first and last byte) into the page cache, without waiting for it.

    Files that cannot be opened are left out: whoever reads them says why. Does nothing where a system has no
    such call.
    """

    def advise() -> None:
        with suppress(CheckpointError), FolderReader(folder) as reader:
            for file, start, end in extents:
                os.posix_fadvise(reader.fd(file), start, end - start, os.POSIX_FADV_WILLNEED)

    return _announcer().submit(advise if hasattr(os, "posix_fadvise") else lambda: None)


def _threads() -> int:
    return min(THREADS, usable_cores())


@cache
def _pool() -> ThreadPoolExecutor:
    """The threads of this process that read, which are started as they are needed."""
    return ThreadPoolExecutor(_threads(), "load")


@cache
def _announcer() -> ThreadPoolExecutor:
    """The thread that announces: the system may make it wait for a disk."""
    return ThreadPoolExecutor(1, "announce")


if hasattr(os, "register_at_fork"):
    # A forked process has none of its parent's threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)
    os.register_at_fork(after_in_child=_announcer.cache_clear)


def _piece_bytes(total: int) -> int:
    """Size of pieces that keeps all threads busy, if they need not become too small."""
    return min(BUFFER_BYTES, max(SMALLEST_PIECE, -(-total // (2 * _threads()))))


def _pieces(transfers: Iterable[Transfer], limit: int) -> Iterator[list[Transfer]]:
    """The transfers in groups of `limit` bytes; those that cross a group's end are split there."""
    piece: list[Transfer] = []
    room = limit
    for item in transfers:
        done = 0
        while done < item.size:
            size = min(room, item.size - done)
            piece.append(Transfer(item.file, item.start + done, size, item.target, item.at + done))
            done, room = done + size, room - size
            if not room:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece


def _run_all(work: Callable[[list[Transfer]], None], pieces: list[list[Transfer]]) -> None:
    """Runs `work` on every piece in the pool's threads; once one fails, those not begun are left out."""
    futures = [_pool().submit(work, piece) for piece in pieces]
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


class _Buffer:
    """A staging buffer, pinned if the system allows it, and the end of the last copy from it."""

    def __init__(self, device: torch.device) -> None:
        try:
            pinned = device.type == "cuda"
            self.bytes = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError:
            # The system limits locked memory. Copies from other memory are slower, and as right.
            self.bytes = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        self.view = as_bytes(self.bytes)
        # A thread that waits leaves its core to those that read.
        self.copied = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class _Lane:
    """What one thread uses to fill tensors on one device: buffers in turn, and a stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._turns = cycle([_Buffer(device) for _ in range(BUFFERS)])
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def next(self) -> _Buffer:
        """The buffer used longest ago, once nothing is copied from it any more."""
        buffer = next(self._turns)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer


class _Lanes(threading.local):
    """The lanes of the current thread."""

    def __init__(self) -> None:
        self._of: dict[torch.device, _Lane] = {}

    def of(self, device: torch.device) -> _Lane:
        if device not in self._of:
            self._of[device] = _Lane(device)
        return self._of[device]


_LANES = _Lanes()


@dataclass
class _Staged:
    """Transfers through staging buffers to tensors on `device`."""

    device: torch.device
    fds: dict[str, int]
    _used: dict[_Lane, _Buffer] = field(default_factory=dict)
    _begin: torch.cuda.Event | None = None

    def run(self, pieces: list[list[Transfer]]) -> None:
        if self.device.type != "cuda":
            _run_all(self._piece, pieces)
            return
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            self._begin = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._begin.record(stream)
            try:
                _run_all(self._piece, pieces)
            except BaseException:
                for lane in self._used:
                    lane.stream.synchronize()  # type: ignore[union-attr]
                raise
            for buffer in self._used.values():
                stream.wait_event(buffer.copied)  # type: ignore[arg-type]

    def _piece(self, piece: list[Transfer]) -> None:
        # Targets may have been made in this mode, and only there can they be written to.
        with torch.inference_mode():
            if self.device.type != "cuda":
                self._copy(piece, self._filled(_LANES.of(self.device).next(), piece))
                return
            with torch.cuda.device(self.device):
                lane = _LANES.of(self.device)
                buffer = self._filled(lane.next(), piece)
                with torch.cuda.stream(lane.stream):
                    lane.stream.wait_event(self._begin)  # type: ignore[union-attr, arg-type]
                    self._used[lane] = buffer
                    self._copy(piece, buffer)
                    buffer.copied.record(lane.stream)  # type: ignore[union-attr]

    def _filled(self, buffer: _Buffer, piece: list[Transfer]) -> _Buffer:
        at = 0
        for item in piece:
            read_exactly(self.fds[item.file], buffer.view[at : at + item.size], item.start, item.file)
            at += item.size
        return buffer

    @staticmethod
    def _copy(piece: list[Transfer], buffer: _Buffer) -> None:
        """Copies the piece's bytes from the buffer, neighbours in a target together."""
        at, i = 0, 0
        while i < len(piece):
            target, first = piece[i].target, piece[i].at
            last = first
            while i < len(piece) and piece[i].target is target and piece[i].at == last:
                last += piece[i].size
                i += 1
            source = buffer.bytes[at : at + last - first]
            target[first:last].copy_(source, non_blocking=buffer.copied is not None)
            at += last - first
