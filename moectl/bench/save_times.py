"""Saves the times of a bench for choices by measurement on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..cache import backend_times_file
from ..cache.backend_times import FEWEST_ROUNDS, BackendTime
from .bench_rows import BenchRow
from .run_bench import Bench
from .run_metadata import versions_of


def save_times(bench: Bench, rows: Sequence[BenchRow], when: str = "") -> tuple[Path, ...]:
    """Saves the timed rows to the user's cache, a layer at a time, and returns the files.

    `when` is the time of their run as ISO 8601; by default now.

    Raises Unavailable when the cache cannot be written.
    """
    files = []
    for target in bench.targets:
        layer = (target.model, target.layers, str(target.problem.scheme), target.parallel)
        times = [
            _timed(row)
            for row in rows
            if row.timed and (row.model, row.layers, row.scheme, row.parallel) == layer
        ]
        if times:
            machine = bench.machine
            versions = versions_of(machine)
            files.append(
                backend_times_file.save(
                    machine.device,
                    target.problem,
                    times,
                    versions=versions,
                    source="moectl bench",
                    when=when,
                )
            )
    return tuple(dict.fromkeys(files))


def _timed(row: BenchRow) -> BackendTime:
    assert row.median_us is not None and row.spread_us is not None and row.error_rms is not None
    cold = row.caches.startswith("cold")
    spread = row.spread_us if row.rounds >= FEWEST_ROUNDS else row.median_us
    return BackendTime(
        row.backend, row.tactic, row.tokens, row.routing, row.median_us, spread, cold, row.error_rms
    )
