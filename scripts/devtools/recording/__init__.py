"""Recordings of an engine's decisions: its own oracle functions, run on a machine without a GPU."""

from .recording import read_cells, record
from .wheel import wheel_files

__all__ = ["read_cells", "record", "wheel_files"]
