"""Settings and rows for the tests of the bench."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moectl.bench.rows import Row
from moectl.bench.settings import Settings
from moectl.floors import Rates

RATES = Rates(1e10, 1e11, "test")


def settings_of(**changes: Any) -> Settings:
    """A quick bench of a model that is not asked for its weights."""
    return replace(Settings(models=("tiny",), tokens=(1, 40), rounds=3, warm=True), **changes)


def row_of(**changes: Any) -> Row:
    """A row with a time of 100 us."""
    row = Row(
        "tiny", "0-3", 0, "mxfp4", "torch", 8, "uniform", ok=True, error_rms=1e-3, error_max=1e-2,
        layout="canonical", median_us=100.0, q1_us=98.0, q3_us=103.0, fastest_us=97.0, rounds=11,
        bytes=10**6, flops=10**7, gb_per_s=10.0, tflop_per_s=0.1, floor_us=50.0, bound="memory",
        floor_percent=50.0, experts=4.5, caches="cold: flushed before each call",
    )  # fmt: skip
    return replace(row, **changes)
