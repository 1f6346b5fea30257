"""Pieces of work on threads in which torch itself runs single-threaded.

Torch parallelizes every operation over its threads, with a barrier after each; threads that each run whole
pieces synchronize once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

from ...lazy_torch import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_on_threads(body: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """``[body(item) for item in items]`` on `threads` threads; raises the first error."""
    if threads == 1:
        return [body(item) for item in items]
    return list(_pool(threads).map(body, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which torch is single-threaded; the calling thread keeps its setting."""
    before = torch.get_num_threads()
    started = Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread copies the global number
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="quantize", initializer=start)
    for _ in range(threads):
        pool.submit(lambda: None)
    started.wait()
    torch.set_num_threads(before)
    return pool
