"""moectl: explain, convert, run and bench quantized Mixture-of-Experts layers."""

__version__ = "0.1.0"
