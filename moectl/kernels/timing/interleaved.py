"""Interleaved timing of several implementations, so that drift (clocks, temperature) affects all equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from ...cache.backend_times import FEWEST_ROUNDS
from .cold_calls import captured, event, flusher, run_all, settle

MakeOutput = Callable[[], Tensor]

VISITS = 3
"""Number of blocks into which an implementation's rounds are split on a GPU; other blocks run in between."""

MOST_SECONDS = 2.0
"""Limit in seconds on all rounds of one implementation in a case."""


@dataclass
class TimedCalls:
    """Calls that are timed together, ready to be repeated.

    Attributes:
        run: runs them; on a CPU one of them, in rotation.
        calls: number of calls in a `run`.
        method: how they are run, for tables.
        outputs: outputs of these calls; overwritten by `run` if it replays a graph.
        estimate: approximate seconds of a `run`.
        seconds: per call, of each round so far.
    """

    run: Callable[[], object]
    calls: int
    method: str
    outputs: Sequence[Tensor]
    estimate: float
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Times of a call over rounds, in microseconds."""

    median: float
    q1: float
    q3: float
    fastest: float
    rounds: int


def quartiles(seconds: Sequence[float]) -> Quartiles:
    """The quartiles of one or more times in seconds."""
    us = sorted(1e6 * s for s in seconds)
    low, _, high = statistics.quantiles(us, n=4, method="inclusive") if len(us) > 1 else (us[0],) * 3
    return Quartiles(statistics.median(us), low, high, us[0], len(us))


def prepare_calls(calls: Sequence[MakeOutput], device: torch.device, capturable: bool) -> TimedCalls:
    """`calls` ready to be timed: warmed up, and on CUDA captured in one graph if they are `capturable`.

    If calls cannot be captured and take long, only the last ones are timed, to stay below `MOST_SECONDS`.
    The outputs of a captured graph are its own buffers, filled with NaN before a first replay, so that the
    results that are compared come from the graph.
    """
    if device.type != "cuda":
        outputs = [call() for call in calls[:-1]]
        last, seconds = _timed(calls[-1], device)
        return TimedCalls(_round_robin(calls), 1, "clock", [*outputs, last], seconds)
    calls[-1]()  # compiles
    output, seconds = _timed(calls[-1], device)
    if not capturable:
        last_calls = calls[-max(1, min(len(calls), int(MOST_SECONDS / FEWEST_ROUNDS / max(seconds, 1e-9)))) :]
        outputs = [*(call() for call in last_calls[:-1]), output]
        return TimedCalls(
            partial(run_all, last_calls),
            len(last_calls),
            "calls between events",
            outputs,
            seconds * len(last_calls),
        )
    graph, outputs = captured(calls)
    for y in outputs:
        y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(device)
    word = "one call" if len(calls) == 1 else f"{len(calls)} calls"
    return TimedCalls(graph.replay, len(calls), f"CUDA graph of {word}", outputs, seconds * len(calls))


def _timed(call: MakeOutput, device: torch.device) -> tuple[Tensor, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    y = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return y, time.perf_counter() - begin


def _round_robin(calls: Sequence[MakeOutput]) -> Callable[[], object]:
    """A function that runs the next of `calls`, in rotation."""
    rotation = cycle(calls)
    return lambda: next(rotation)()


def time_interleaved(
    timed: Mapping[str, TimedCalls], device: torch.device, rounds: int, cold: bool
) -> dict[str, Exception]:
    """Times all implementations round-robin into their `seconds`, and returns the exceptions by name.

    An exception ends only the rounds of the implementation that raised it; a GPU that no longer responds
    (`alive`) ends all. Each implementation gets `rounds` rounds, or as many as `MOST_SECONDS` allows but at
    least `FEWEST_ROUNDS` (or `rounds`), spread evenly, in `balanced_orders`. On a GPU, rounds are run in
    `VISITS` blocks after the clocks have settled (`settle`), unless one run takes long. With `cold`, caches
    are flushed before each measurement.
    """
    flush = flusher(device) if cold else None
    shares = {name: _affordable_rounds(calls, rounds) for name, calls in timed.items()}
    failed: dict[str, Exception] = {}
    names = list(timed)
    orders = balanced_orders(len(names))
    visits = min(VISITS, rounds) if device.type == "cuda" else rounds
    for visit in range(visits if names else 0):
        for name in (names[at] for at in orders[visit % len(orders)]):
            due = (visit + 1) * shares[name] // visits - visit * shares[name] // visits
            if name in failed or not due:
                continue
            try:
                if device.type == "cuda" and timed[name].estimate <= MOST_SECONDS / FEWEST_ROUNDS:
                    settle(timed[name].run, device)
                for _ in range(due):
                    if flush is not None:
                        flush()
                    timed[name].seconds.append(_time_round(timed[name], device))
            except Exception as error:  # a library can raise anything; the others continue
                failed[name] = error
                if not alive(device):
                    return failed
    return failed


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of 0 to `count` - 1 in which each number directly follows every other equally often.

    So the state that one leaves (clocks, heat) affects all others equally. Williams (1949): one row whose
    neighbours differ by every number, shifted; for odd counts reversed as well.

    Example:
        >>> balanced_orders(2)
        [[0, 1], [1, 0]]
    """
    first = [(at + 1) // 2 if at % 2 else (count - at // 2) % count for at in range(count)]
    orders = [[(at + shift) % count for at in first] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def alive(device: torch.device) -> bool:
    """False when the GPU no longer responds to this process, as after an illegal access."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
    return True


def _affordable_rounds(calls: TimedCalls, rounds: int) -> int:
    affordable = int(MOST_SECONDS / max(calls.estimate, 1e-9))
    return min(rounds, max(FEWEST_ROUNDS, affordable))


def _time_round(calls: TimedCalls, device: torch.device) -> float:
    """Seconds per call of one run."""
    if device.type != "cuda":
        begin = time.perf_counter()
        calls.run()
        return (time.perf_counter() - begin) / calls.calls
    start, stop = event(), event()
    start.record()
    calls.run()
    stop.record()
    stop.synchronize()  # an error of this call must not surface in the next one
    return float(start.elapsed_time(stop)) * 1e-3 / calls.calls
