"""Saves the times of a bench in the user's cache, where they choose backends on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..cache import backend_times_file
from ..cache.backend_times import FEWEST_ROUNDS, BackendTime
from .bench_rows import BenchRow
from .run_bench import Bench
from .run_metadata import versions_of


def save_times(bench: Bench, rows: Sequence[BenchRow], when: str = "") -> tuple[Path, ...]:
    """Saves the timed rows in the user's cache, layer by layer, and returns the files.

    `when` is the time of the run as ISO 8601, by default now. Raises Unavailable if the cache cannot be
    written.
    """
    files = []
    for target in bench.targets:
        layer = (target.model, target.layers, str(target.problem.scheme), target.parallel)
        times = [
            _backend_time(row)
            for row in rows
            if row.timed and (row.model, row.layers, row.scheme, row.parallel) == layer
        ]
        if times:
            files.append(
                backend_times_file.save(
                    bench.machine.device,
                    target.problem,
                    times,
                    versions=versions_of(bench.machine),
                    source="moectl bench",
                    when=when,
                )
            )
    return tuple(dict.fromkeys(files))


def _backend_time(row: BenchRow) -> BackendTime:
    assert row.median_us is not None and row.spread_us is not None and row.error_rms is not None
    cold = row.caches.startswith("cold")
    spread = row.spread_us if row.rounds >= FEWEST_ROUNDS else row.median_us
    return BackendTime(
        row.backend, row.tactic, row.tokens, row.routing, row.median_us, spread, cold, row.error_rms
    )
