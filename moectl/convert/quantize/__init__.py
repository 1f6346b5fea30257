"""Quantization of weights to the codes and scales of a format, with a report of the errors."""

from __future__ import annotations

from .calibration import Calibration, hessian, importance, intermediate
from .error_report import QuantizationReport, SquaredErrors, WorstBlock
from .quantize_weights import QuantizedRoles, quantize
from .quantizer_options import METHODS, Quantizer

__all__ = [
    "METHODS",
    "Calibration",
    "QuantizationReport",
    "QuantizedRoles",
    "Quantizer",
    "SquaredErrors",
    "WorstBlock",
    "hessian",
    "importance",
    "intermediate",
    "quantize",
]
