"""Quantizers: weights to the codes and scales of a format, and a report of what it costs."""

from __future__ import annotations

from .calibration import Calibration, hessian, importance, intermediate
from .options import METHODS, Quantizer
from .report import Errors, Report, Worst
from .run import Quantized, quantize

__all__ = [
    "METHODS",
    "Calibration",
    "Errors",
    "Quantized",
    "Quantizer",
    "Report",
    "Worst",
    "hessian",
    "importance",
    "intermediate",
    "quantize",
]
