"""Jobs through reading, converting and writing, with hashing beside them, in a fixed number of slots.

One thread reads ahead, the caller's converts, others hash and write. A slot holds one job's buffers from
its first byte read to its last byte written, so that memory is the slots' and nothing more.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from torch import Tensor

SLOTS = 3
"""Jobs that are under way at once: one read, one converted, one written."""

MOST_HASHERS = 8
"""Threads that hash; each follows one tensor at a time, and a layer has few that are large."""

MOST_WRITERS = 4
"""Threads that write; more only wait for each other in the file system."""


@dataclass
class PipelineSlot:
    """Buffers of one job: what is read, the canonical tensors made of it, what is written."""

    read: Tensor
    made: Tensor
    written: Tensor
    pending: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when nothing uses the buffers any more; raises what went wrong with them."""
        pending, self.pending = self.pending, []
        for future in pending:
            future.result()


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return max(1, os.cpu_count() or 1)


class WorkerThreads:
    """Threads that hash and write while others read and convert; with one thread, the caller itself."""

    def __init__(self, threads: int) -> None:
        self.size, self.alone = threads, threads == 1
        count = 0 if self.alone else 1
        self._lanes = [ThreadPoolExecutor(1, "hash") for _ in range(count * min(threads, MOST_HASHERS))]
        self._waiting = [0] * len(self._lanes)
        self._lane_of: dict[str, int] = {}
        self._lock = threading.Lock()
        self._writers = ThreadPoolExecutor(min(MOST_WRITERS, max(1, threads // 4)), "write")
        self._closer = ThreadPoolExecutor(1, "sync")

    def hash(self, name: str, nbytes: int, task: Callable[[], None], *, last: bool) -> Future[None]:
        """Does `task` after the earlier ones of the same `name`; `last` when none follows."""
        if self.alone:
            return done(task)
        with self._lock:
            found = self._lane_of.get(name)
            lane = self._waiting.index(min(self._waiting)) if found is None else found
            self._lane_of[name] = lane
            if last:
                del self._lane_of[name]
            self._waiting[lane] += nbytes

        def counted() -> None:
            try:
                task()
            finally:
                with self._lock:
                    self._waiting[lane] -= nbytes

        return self._lanes[lane].submit(counted)

    def write(self, task: Callable[[], None]) -> Future[None]:
        """Does `task` beside all others."""
        return done(task) if self.alone else self._writers.submit(task)

    def close_file(self, task: Callable[[], None]) -> Future[None]:
        """Does `task` after the earlier ones of this kind, beside all others."""
        return done(task) if self.alone else self._closer.submit(task)

    def dismiss(self) -> None:
        """Returns when no thread runs any more; tasks that have not begun are dropped."""
        for pool in (*self._lanes, self._writers, self._closer):
            pool.shutdown(cancel_futures=True)


def done(task: Callable[[], None]) -> Future[None]:
    """`task` done at once, as a future."""
    task()
    future: Future[None] = Future()
    future.set_result(None)
    return future


Job = TypeVar("Job")
Made = TypeVar("Made")
Job_in = TypeVar("Job_in", contravariant=True)


class PipelineStages(Protocol[Job_in, Made]):
    """What is done with a job; `read` and `write` put what still uses the slot into its `pending`."""

    def read(self, job: Job_in, slot: PipelineSlot) -> None: ...

    def work(self, job: Job_in, slot: PipelineSlot) -> Made: ...

    def write(self, job: Job_in, slot: PipelineSlot, made: Made) -> None: ...


def run_pipeline(jobs: Iterable[Job], stages: PipelineStages[Job, Made], slots: list[PipelineSlot]) -> None:
    """Takes every job through the stages, in order; with one slot, one thing after another.

    `jobs` is drawn from by the reading thread. The first error of any stage is raised, after all of
    them stand still.
    """
    if len(slots) == 1:
        for job in jobs:
            stages.read(job, slots[0])
            stages.write(job, slots[0], stages.work(job, slots[0]))
            slots[0].wait()
            release_memory()
        return
    reader = _Reader(jobs, stages, slots)
    try:
        while (item := reader.next()) is not None:
            job, slot = item
            stages.write(job, slot, stages.work(job, slot))
            reader.free(slot)
            release_memory()
        for slot in slots:
            slot.wait()
    finally:
        reader.stop()


class _Reader(Generic[Job]):
    """The thread that reads jobs into slots as these become free."""

    def __init__(
        self, jobs: Iterable[Job], stages: PipelineStages[Job, Made], slots: list[PipelineSlot]
    ) -> None:
        self._free: SimpleQueue[PipelineSlot | None] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Job, PipelineSlot] | BaseException | None] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(jobs, stages), name="read", daemon=True)
        self._thread.start()

    def _run(self, jobs: Iterable[Job], stages: PipelineStages[Job, Made]) -> None:
        try:
            for job in jobs:
                slot = self._free.get()
                if slot is None or self._stopped:
                    return
                slot.wait()
                stages.read(job, slot)
                self._ready.put((job, slot))
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def next(self) -> tuple[Job, PipelineSlot] | None:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def free(self, slot: PipelineSlot) -> None:
        self._free.put(slot)

    def stop(self) -> None:
        self._stopped = True
        self._free.put(None)
        self._thread.join()


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
