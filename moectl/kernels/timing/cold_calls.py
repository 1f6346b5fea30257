"""Times of calls, with cold caches unless asked otherwise, and measured rates of a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from ...errors import UsageError
from ...files.safe_reading import text_or_empty
from ...problem.roofline import MeasuredRates

Call = Callable[[], object]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one call.

    Attributes:
        median_us: median in microseconds.
        spread_us: distance between the first and the third quartile.
        fastest_us: the shortest.
        samples: number of measurements.
        cold: whether caches were flushed before each.
        method: how it was measured.
    """

    median_us: float
    spread_us: float
    fastest_us: float
    samples: int
    cold: bool
    method: str


LEAD_SECONDS = 0.05
"""How long a GPU is kept busy before it is timed. At its power limit it takes about that long to change its
clocks, and until then a kernel runs at the clocks of the one before it (docs/bench.md has an example)."""


def settle(run: Call, device: torch.device) -> None:
    """Calls `run` untimed, once or more, until the GPU's clocks have settled to this workload."""
    end = time.monotonic() + LEAD_SECONDS
    while True:
        run()
        torch.cuda.synchronize(device)
        if time.monotonic() >= end:
            return


def time_calls(
    calls: Sequence[Call],
    device: torch.device,
    *,
    repeats: int = 11,
    cold: bool = True,
    capturable: bool = True,
    settled: bool = False,
) -> Timing:
    """Time of one of `calls`: equal work on different inputs, so that one call does not warm the next.

    With `cold`, caches are flushed before every measurement; a measurement of several calls stays cold only
    if together they touch more memory than the cache holds.

    On CUDA all calls are captured in one graph, which is replayed between two events; calls that are not
    `capturable` run one after the other between the events. On a CPU one call at a time runs between two
    readings of the clock. With `settled`, a GPU's clocks settle first (`settle`).

    Example:
        >>> x = torch.ones(64, 64)
        >>> time_calls([lambda: x @ x], torch.device("cpu"), repeats=3, cold=False).samples
        3
    """
    if not calls or repeats < 1:
        raise UsageError(f"timing needs calls and repeats, got {len(calls)} and {repeats}")
    if device.type == "cuda":
        return _time_cuda(calls, repeats, cold, capturable, settled)
    return _time_cpu(calls, repeats, cold)


def _summary(seconds: Sequence[float], cold: bool, method: str) -> Timing:
    us = [1e6 * s for s in seconds]
    low, _, high = statistics.quantiles(us, n=4) if len(us) > 1 else (us[0],) * 3
    return Timing(statistics.median(us), high - low, min(us), len(us), cold, method)


def _time_cpu(calls: Sequence[Call], repeats: int, cold: bool) -> Timing:
    flush = flusher(torch.device("cpu")) if cold else None
    calls[0]()
    seconds = []
    for i in range(repeats):
        if flush is not None:
            flush()
        start = time.perf_counter()
        calls[i % len(calls)]()
        seconds.append(time.perf_counter() - start)
    return _summary(seconds, cold, "clock")


def _time_cuda(calls: Sequence[Call], repeats: int, cold: bool, capturable: bool, settled: bool) -> Timing:
    flush = flusher(torch.device("cuda")) if cold else None
    run = captured(calls)[0].replay if capturable else partial(run_all, calls)
    run()
    if settled:
        settle(run, torch.device("cuda"))
    method = "cuda graph" if capturable else "cuda calls"
    events = []
    for _ in range(repeats):
        if flush is not None:
            flush()
        start, stop = event(), event()
        start.record()
        run()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return _summary([a.elapsed_time(b) * 1e-3 / len(calls) for a, b in events], cold, method)


def run_all(calls: Sequence[Call]) -> None:
    """Runs `calls` one after the other."""
    for call in calls:
        call()


def event() -> torch.cuda.Event:
    """A CUDA event that records times."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def captured(calls: Sequence[Callable[[], Result]]) -> tuple[torch.cuda.CUDAGraph, list[Result]]:
    """A CUDA graph of all `calls` and their results, which each replay overwrites.

    Each call runs once before the capture, so that its kernels are compiled.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


def flusher(device: torch.device) -> Call:
    """A function that evicts everything from the last-level cache of `device`."""
    size = last_level_cache(device)
    buffer = torch.empty(2 * size, dtype=torch.uint8, device=device)
    return lambda: buffer.add_(1)


def last_level_cache(device: torch.device) -> int:
    """Bytes of the largest cache in front of the memory of `device`."""
    return _cuda_cache() if device.type == "cuda" else _cpu_cache()


def _cuda_cache() -> int:
    """Bytes of the GPU's L2; 64 MB if torch does not report it."""
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)) or 64 << 20


CACHE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@cache
def _cpu_cache() -> int:
    """Bytes of this CPU's largest cache, at most 256 MB; 64 MB if the system does not report it."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = text_or_empty(file).strip()
        if text[:-1].isdigit() and text[-1] in CACHE_UNITS:
            sizes.append(int(text[:-1]) * CACHE_UNITS[text[-1]])
    return min(max(sizes, default=64 << 20), 256 << 20)


def measure_copy_bandwidth(device: torch.device, nbytes: int = 0) -> float:
    """Bytes read plus written per second by a pass over `nbytes` (2 GB on a GPU, 256 MB on a CPU).

    The fastest of several. An elementwise kernel is used because a plain copy in a CUDA graph may run on a
    copy engine, which is slower than the memory.
    """
    nbytes = nbytes or (2 << 30 if device.type == "cuda" else 256 << 20)
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = time_calls([lambda: torch.neg(source, out=target)], device, repeats=7, cold=False)
    return 2 * nbytes / (timing.fastest_us * 1e-6)


def measure_matmul_rate(device: torch.device, size: int = 0) -> float:
    """FLOP/s of a square matmul of random values: 8192 wide in bf16 on a GPU, 1024 in fp32 on a CPU."""
    size = size or (8192 if device.type == "cuda" else 1024)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timing = time_calls([lambda: a @ b], device, repeats=7, cold=False)
    return 2 * size**3 / (timing.fastest_us * 1e-6)


def measure_fp8_rate(device: torch.device) -> float:
    """FLOP/s of a square FP8 matmul of random values, 8192 wide, with scales per row; 0 without FP8 units."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return 0.0
    size = 8192
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    rows, columns = torch.ones(size, 1, device=device), torch.ones(1, size, device=device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(a, b.T, rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        timing = time_calls([product], device, repeats=7, cold=False)
    except RuntimeError:  # this torch has no such product for the device
        return 0.0
    return 2 * size**3 / (timing.fastest_us * 1e-6)


def measured_rates(device: torch.device) -> MeasuredRates:
    """Bandwidth and matrix rates of `device`, measured now (about a second)."""
    copy, matmul = measure_copy_bandwidth(device), measure_matmul_rate(device)
    return MeasuredRates(copy, matmul, "measured", measure_fp8_rate(device))
