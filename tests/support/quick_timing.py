"""A machine that is measured fast, for tests that time calls and ask for no speed.

Of a CPU with a large cache each timed call that begins cold overwrites twice the cache, half a gigabyte, and
each `moectl bench` measures the rates of memory and of products for its roofline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest.mock import patch

from moectl.bench import open_bench
from moectl.kernels.timing import cold_calls

measured_rates = cold_calls.measured_rates
once = cache(measured_rates)


@contextmanager
def quick_timing() -> Iterator[None]:
    """Takes the CPU's cache for one of 1 MiB, and measures each device's rates once in a process."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(cold_calls, "_cpu_cache", lambda: 1 << 20))
        # A test may have put its own rates there.
        if open_bench.measured_rates is measured_rates:
            stack.enter_context(patch.object(open_bench, "measured_rates", once))
        yield
