"""Quantizers: weights to the codes and scales of a format, and a report of what it costs."""

from __future__ import annotations

from .options import METHODS, Quantizer
from .report import Errors, Report, Worst
from .run import Quantized, quantize

__all__ = ["METHODS", "Errors", "Quantized", "Quantizer", "Report", "Worst", "quantize"]
