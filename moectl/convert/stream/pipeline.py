"""A pipeline of read, convert, hash and write stages with a fixed number of slots.

One thread reads ahead, the calling thread converts, and others hash and write. A slot holds one job's buffers
from the first byte read to the last byte written, so that memory use is bounded by the slots.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from ...lazy_torch import Tensor

SLOTS = 3
"""Jobs in flight at once: one being read, one converted, one written."""

MAX_HASHERS = 8
"""Most hashing threads; each hashes one tensor at a time, and a layer has few large ones."""

MAX_WRITERS = 4
"""Most writing threads; more would only contend in the file system."""


@dataclass
class PipelineSlot:
    """Buffers of one job: bytes as read, canonical tensors, and bytes to write."""

    read: Tensor
    canonical: Tensor
    written: Tensor
    pending: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Waits until nothing uses the buffers any more; raises the first error of a pending task."""
        pending, self.pending = self.pending, []
        for future in pending:
            future.result()


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return max(1, os.cpu_count() or 1)


class WorkerThreads:
    """Threads that hash and write in the background; with one thread, tasks run in the calling thread."""

    def __init__(self, threads: int) -> None:
        self.size, self.alone = threads, threads == 1
        count = 0 if self.alone else 1
        self._hashers = [ThreadPoolExecutor(1, "hash") for _ in range(count * min(threads, MAX_HASHERS))]
        self._waiting = [0] * len(self._hashers)
        self._hasher_of: dict[str, int] = {}
        self._lock = threading.Lock()
        self._writers = ThreadPoolExecutor(min(MAX_WRITERS, max(1, threads // 4)), "write")
        self._closer = ThreadPoolExecutor(1, "sync")

    def hash(self, name: str, nbytes: int, task: Callable[[], None], *, last: bool) -> Future[None]:
        """Runs `task` after earlier ones of the same `name`; `last` if none follows."""
        if self.alone:
            return run_now(task)
        with self._lock:
            assigned = self._hasher_of.get(name)
            hasher = self._waiting.index(min(self._waiting)) if assigned is None else assigned
            self._hasher_of[name] = hasher
            if last:
                del self._hasher_of[name]
            self._waiting[hasher] += nbytes

        def run() -> None:
            try:
                task()
            finally:
                with self._lock:
                    self._waiting[hasher] -= nbytes

        return self._hashers[hasher].submit(run)

    def write(self, task: Callable[[], None]) -> Future[None]:
        """Runs `task` concurrently with all others."""
        return run_now(task) if self.alone else self._writers.submit(task)

    def close_file(self, task: Callable[[], None]) -> Future[None]:
        """Runs `task` after earlier ones of this kind, concurrently with all others."""
        return run_now(task) if self.alone else self._closer.submit(task)

    def shutdown(self) -> None:
        """Waits for running tasks and cancels those that have not begun."""
        for pool in (*self._hashers, self._writers, self._closer):
            pool.shutdown(cancel_futures=True)


def run_now(task: Callable[[], None]) -> Future[None]:
    """Runs `task` in the calling thread and returns a finished future."""
    task()
    future: Future[None] = Future()
    future.set_result(None)
    return future


Job = TypeVar("Job")
Converted = TypeVar("Converted")
Job_in = TypeVar("Job_in", contravariant=True)


class PipelineStages(Protocol[Job_in, Converted]):
    """The stages of a job; `read` and `write` add tasks that still use the slot to its `pending`."""

    def read(self, job: Job_in, slot: PipelineSlot) -> None: ...

    def work(self, job: Job_in, slot: PipelineSlot) -> Converted: ...

    def write(self, job: Job_in, slot: PipelineSlot, converted: Converted) -> None: ...


def run_pipeline(
    jobs: Iterable[Job], stages: PipelineStages[Job, Converted], slots: list[PipelineSlot]
) -> None:
    """Runs every job through the stages, in order; with one slot, strictly one stage at a time.

    The reading thread iterates over `jobs`. The first error of any stage is raised once all stages have
    stopped.
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


def run_ahead(work: Callable[[Job], Converted], jobs: Sequence[Job], ahead: int) -> Iterator[Converted]:
    """The results of `work` on every job, in order; up to `ahead` jobs run at once, each in a thread.

    With the result that the caller has, results of at most `ahead` + 1 jobs exist at a time. The first error
    is raised in its turn; jobs that have not begun are left out then, and when the caller stops.

    Example:
        >>> list(run_ahead(lambda number: number * number, [1, 2, 3], 2))
        [1, 4, 9]
    """
    waiting: deque[Future[Converted]] = deque()
    with ThreadPoolExecutor(ahead, "ahead") as threads:
        try:
            for i in range(len(jobs)):
                waiting += (threads.submit(work, job) for job in jobs[i + len(waiting) : i + ahead])
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _Reader(Generic[Job]):
    """The thread that reads jobs into slots as they become free."""

    def __init__(
        self, jobs: Iterable[Job], stages: PipelineStages[Job, Converted], slots: list[PipelineSlot]
    ) -> None:
        self._free: SimpleQueue[PipelineSlot | None] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Job, PipelineSlot] | BaseException | None] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(jobs, stages), name="read", daemon=True)
        self._thread.start()

    def _run(self, jobs: Iterable[Job], stages: PipelineStages[Job, Converted]) -> None:
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
    """Returns freed memory to the operating system if the C library can.

    glibc keeps freed blocks, so that the temporaries of successive batches would add up.
    """
    _trim(0)
