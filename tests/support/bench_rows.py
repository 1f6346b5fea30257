"""Settings and rows for the tests of the bench."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from moectl.bench.bench_rows import BenchRow, PreparationCosts
from moectl.bench.journal import RowJournal, RunHeader
from moectl.bench.settings import BenchSettings
from moectl.problem.roofline import MeasuredRates

RATES = MeasuredRates(1e10, 1e11, "test")


def settings_of(**changes: Any) -> BenchSettings:
    """A quick bench of a model that is not asked for its weights."""
    return replace(BenchSettings(models=("tiny",), tokens=(1, 40), rounds=3, warm=True), **changes)


def row_of(**changes: Any) -> BenchRow:
    """A row with a time of 100 us."""
    row = BenchRow(
        "tiny", "0-3", 0, "mxfp4", "torch", 8, "uniform", ok=True, error_rms=1e-3, error_max=1e-2,
        layout="canonical", median_us=100.0, q1_us=98.0, q3_us=103.0, fastest_us=97.0, rounds=11,
        bytes=10**6, flops=10**7, gb_per_s=10.0, tflop_per_s=0.1, floor_us=50.0, bound="memory",
        floor_percent=50.0, experts=4.5, caches="cold: flushed before each call",
    )  # fmt: skip
    return replace(row, **changes)


MACHINE = {
    "device": "a CPU",
    "driver": "",
    "versions": {"moectl": "0.1.0", "torch": "2.11"},
    "rates": {"bandwidth": 4e12, "flops": 8e14, "source": "given"},
    "caches": "cold",
}
FAILED = row_of(
    backend="moectl", tokens=64, ok=None, error_rms=None, error_max=None, reason="RuntimeError: a | b",
    median_us=None, q1_us=None, q3_us=None, fastest_us=None, rounds=0, gb_per_s=None, tflop_per_s=None,
    floor_percent=None,
)  # fmt: skip
ROWS = (
    row_of(
        costs=PreparationCosts(0.5, 0.25, 0.125, 10**9, 2 * 10**9),
        tactic="tile 8",
        sm_mhz=1980,
        throttled="power cap",
    ),
    row_of(tokens=64, median_us=1234.5, q1_us=1200.0, q3_us=1300.0),
    FAILED,
)


def timed(median: float, half: float, **changes: Any) -> BenchRow:
    """A row whose quartiles lie `half` beside the median."""
    return row_of(median_us=median, q1_us=median - half, q3_us=median + half, **changes)


def run(machine: dict[str, Any] = MACHINE, **changes: Any) -> RunHeader:
    """What a file says of the run of `settings_of(**changes)`."""
    return RunHeader(settings_of(**changes).to_json(), machine)


def write(path: Path, *rows: BenchRow) -> None:
    """A file of the run and rows, as a bench leaves it."""
    with RowJournal.open(path) as journal:
        journal.begin(run())
        for row in rows:
            journal.add(row)
