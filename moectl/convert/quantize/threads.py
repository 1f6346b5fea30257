"""Pieces of work on threads that each do all of theirs alone.

Torch spreads every single operation over its threads, and each waits for the slowest; whole pieces on
threads of their own wait once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(body: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """``[body(item) for item in items]``, on so many threads; the first error is raised."""
    if threads == 1:
        return [body(item) for item in items]
    return list(_pool(threads).map(body, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which torch uses no others; the calling thread keeps what it had."""
    before = torch.get_num_threads()
    started = Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread takes over the common number when it first asks
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="quantize", initializer=start)
    for _ in range(threads):
        pool.submit(lambda: None)
    started.wait()
    torch.set_num_threads(before)
    return pool
