"""moectl: explain, convert, run and bench quantized Mixture-of-Experts layers."""

__version__ = "0.1.0"

SCHEMA_VERSION = 1
"""Version of the JSON documents; it grows when a field changes its meaning or goes away."""
