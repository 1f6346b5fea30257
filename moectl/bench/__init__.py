"""Times of layers on several backends against the roofline; results are checked first."""

from __future__ import annotations

from .settings import BenchSettings, parse_counts

__all__ = ["BenchSettings", "parse_counts"]
