"""Several ways to compute the same, timed in turns, so that whatever drifts meanwhile hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...cache.backend_times import FEWEST_ROUNDS
from .cold_calls import captured, event, flusher, settle

MakeOutput = Callable[[], Tensor]

VISITS = 3
"""Parts in which the rounds are taken on a GPU: between two of them all others have their own."""

MOST_SECONDS = 2.0
"""Seconds that the rounds of one cell may take, for each of those that are timed."""


@dataclass
class TimedCalls:
    """Calls that are timed together, ready to be made again.

    Attributes:
        run: makes them; on a CPU one of them, the next each time.
        calls: how many `run` makes.
        method: how, in words.
        outputs: of every call, the last ones of those given; overwritten by
            `run` where it is a graph's replay.
        estimate: seconds of `run`, roughly.
        seconds: of each round so far, of one call.
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
    """`calls` ready to be timed: warmed up, and on CUDA captured in one graph where that is possible.

    Calls that cannot be captured and take long are fewer: the last ones, so that together they stay
    below `MOST_SECONDS`. On CUDA the outputs of a captured graph are those of its own buffers, filled
    with NaN before it runs, so that what is compared is what the graph has written.
    """
    if device.type != "cuda":
        outputs = [call() for call in calls[:-1]]
        last, seconds = _timed(calls[-1], device)
        return TimedCalls(_next_of(calls), 1, "clock", [*outputs, last], seconds)
    calls[-1]()  # compiles
    output, seconds = _timed(calls[-1], device)
    if not capturable:
        kept = calls[-max(1, min(len(calls), int(MOST_SECONDS / FEWEST_ROUNDS / max(seconds, 1e-9)))) :]
        outputs = [*(call() for call in kept[:-1]), output]
        return TimedCalls(
            lambda: _all_of(kept), len(kept), "calls between events", outputs, seconds * len(kept)
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


def _next_of(calls: Sequence[MakeOutput]) -> Callable[[], object]:
    def endless() -> Iterator[MakeOutput]:
        while True:
            yield from calls

    turn = endless()
    return lambda: next(turn)()


def _all_of(calls: Sequence[MakeOutput]) -> None:
    for call in calls:
        call()


def time_interleaved(
    turns: Mapping[str, TimedCalls], device: torch.device, rounds: int, cold: bool
) -> dict[str, Exception]:
    """Times all `turns` round-robin into their `seconds`; what one raises ends its own turns alone.

    A GPU that answers no more (`alive`) ends it. Each gets `rounds` rounds, or as many as `MOST_SECONDS`
    allow, at least `FEWEST_ROUNDS` (or `rounds`), spread evenly over all, which go in `balanced_orders`. On
    a GPU some rounds are taken together, on clocks that have settled: see `VISITS` and `settle` (not where
    one run takes long). With `cold`, caches are flushed before each measurement.
    """
    flush = flusher(device) if cold else None
    shares = {name: _rounds_of(turn, rounds) for name, turn in turns.items()}
    failed: dict[str, Exception] = {}
    names = list(turns)
    orders = balanced_orders(len(names))
    visits = min(VISITS, rounds) if device.type == "cuda" else rounds
    for visit in range(visits if names else 0):
        for name in (names[at] for at in orders[visit % len(orders)]):
            due = (visit + 1) * shares[name] // visits - visit * shares[name] // visits
            if name in failed or not due:
                continue
            try:
                if device.type == "cuda" and turns[name].estimate <= MOST_SECONDS / FEWEST_ROUNDS:
                    settle(turns[name].run, device)
                for _ in range(due):
                    if flush is not None:
                        flush()
                    turns[name].seconds.append(_turn(turns[name], device))
            except Exception as error:  # whatever a library raises is told, and the others go on
                failed[name] = error
                if not alive(device):
                    return failed
    return failed


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of 0 to `count` - 1, to be taken in turn: in them each comes right behind every other as often.

    What one leaves behind, in clocks or heat, then meets all others alike. Williams (1949): one row whose
    neighbours differ by every number, shifted; for odd counts backwards too.
    """
    first = [(at + 1) // 2 if at % 2 else (count - at // 2) % count for at in range(count)]
    orders = [[(at + shift) % count for at in first] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def alive(device: torch.device) -> bool:
    """False when a GPU answers this process no more, as after an illegal access."""
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


def _rounds_of(turn: TimedCalls, rounds: int) -> int:
    affordable = int(MOST_SECONDS / max(turn.estimate, 1e-9))
    return min(rounds, max(FEWEST_ROUNDS, affordable))


def _turn(turn: TimedCalls, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        turn.run()
        return (time.perf_counter() - begin) / turn.calls
    start, stop = event(), event()
    start.record()
    turn.run()
    stop.record()
    stop.synchronize()  # an error of this turn is not to be met in the next one's
    return float(start.elapsed_time(stop)) * 1e-3 / turn.calls
