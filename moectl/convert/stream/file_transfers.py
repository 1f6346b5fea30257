"""Byte ranges of files read into tensors on a device, by many threads through pinned buffers.

What bounds the rate: a GPU's link takes 25 GB/s (PCIe 4) or 55 (PCIe 5), but only from pinned memory, and one
thread copies 4 to 10 GB/s out of the page cache. So `THREADS` threads read at once, each into one of its
pinned buffers while another is being copied to the device. What a piece needs of Python and of the driver is
done by one thread at a time and bounds the rate: it took 0.3 to 0.5 ms of each piece on 16 cores while the
threads contended for the interpreter's lock at every call. So one lock is held over all calls of a copy,
streams are chosen once for each thread, and pieces have megabytes. All buffers together stay below a GB,
since pinning memory takes 0.3 s for each.

Several transfers may be under way at once (`begin`): the threads read the first one's pieces first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
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

BUFFER_BYTES = 16 << 20
"""Size of a pinned buffer. Every thread that reads keeps `BUFFERS` of them while the process lives."""

BUFFERS = 2
"""Pinned buffers of a thread: one being filled, one being copied."""

STREAMS = 4
"""Streams for copies, which the threads share: one engine of the GPU does all copies from the host."""

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
    if device.type != "cpu":
        begin(reader, transfers, device).finish()
        return
    every = [item for item in transfers if item.size]
    fds = {file: reader.fd(file) for file in dict.fromkeys(item.file for item in every)}
    pieces = list(_pieces(every, _piece_bytes(sum(item.size for item in every))))
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


def begin(reader: FolderReader, transfers: Iterable[Transfer], device: torch.device) -> Filling:
    """Begins what `transfer` does, and returns while threads read.

    The reader must stay open until `Filling.finish` or `Filling.stop` has returned; one of them must be
    called before the targets are used or given back.
    """
    every = [item for item in transfers if item.size]
    fds = {file: reader.fd(file) for file in dict.fromkeys(item.file for item in every)}
    pieces = _pieces(every, _piece_bytes(sum(item.size for item in every)))
    return Filling(device, fds, list(pieces))


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


@cache
def _streams(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The streams for copies to `device`, over and over."""
    return cycle([torch.cuda.Stream(device) for _ in range(STREAMS)])  # type: ignore[no-untyped-call]


class _Lane:
    """What one thread uses to fill tensors on one device: buffers in turn, and a stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._turns = cycle([_Buffer(device) for _ in range(BUFFERS)])
        with _COPYING:
            self.stream = next(_streams(device)) if device.type == "cuda" else None

    def next(self) -> _Buffer:
        """The buffer used longest ago, once nothing is copied from it any more."""
        buffer = next(self._turns)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer


class _Lanes(threading.local):
    """The lanes of the current thread, which is one of the pool's."""

    def __init__(self) -> None:
        self._of: dict[torch.device, _Lane] = {}
        self._last: _Lane | None = None

    def of(self, device: torch.device) -> _Lane:
        """The lane for `device`; on a GPU its stream is the thread's current one from now on."""
        if device.type == "cuda" and device not in self._of:
            torch.cuda.set_device(device)
        if device not in self._of:
            self._of[device] = _Lane(device)
        lane = self._of[device]
        if lane is not self._last and lane.stream is not None:
            torch.cuda.set_stream(lane.stream)
        self._last = lane
        return lane


_LANES = _Lanes()

_COPYING = threading.Lock()
"""Held over the calls that begin a copy: threads would only take the interpreter's lock from one another."""


class Filling:
    """Transfers under way through staging buffers to tensors on a device (`begin`)."""

    def __init__(self, device: torch.device, fds: dict[str, int], pieces: list[list[Transfer]]) -> None:
        self.fds = fds
        self._used: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._after: torch.cuda.Stream | None = None
        if device.type == "cuda":
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            self._after = torch.cuda.current_stream(device)
            self._begin = self._after.record_event()
        self.device = device
        self._futures = [_pool().submit(self._piece, piece) for piece in pieces]

    def finish(self) -> None:
        """Returns when everything is read and its copies are ahead of what streams are given from now on.

        That is the current stream, and that of `begin`. Raises what `transfer` does.
        """
        try:
            for future in self._futures:
                future.result()
        except BaseException:
            self.stop()
            raise
        self._wait_on_device()

    def stop(self) -> None:
        """Leaves out what is not begun; afterwards nothing writes to the targets, which may be given back."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)
        for stream in self._used:
            stream.synchronize()

    def _wait_on_device(self) -> None:
        if self._after is None:
            return
        for stream in {self._after, torch.cuda.current_stream(self.device)}:
            for copied in self._used.values():
                stream.wait_event(copied)

    def _piece(self, piece: list[Transfer]) -> None:
        lane = _LANES.of(self.device)
        buffer = self._filled(lane.next(), piece)
        # Targets may have been made in this mode, and only there can they be written to.
        with _COPYING, torch.inference_mode():
            if lane.stream is None:
                self._copy(piece, buffer)
                return
            if lane.stream not in self._used:
                lane.stream.wait_event(self._begin)
                self._used[lane.stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            try:
                self._copy(piece, buffer)
            finally:
                assert buffer.copied is not None
                buffer.copied.record(lane.stream)
                self._used[lane.stream].record(lane.stream)

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
