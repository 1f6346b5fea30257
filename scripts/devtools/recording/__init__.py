"""Recordings of an engine's decisions: its own oracle functions, run on a machine without a GPU."""

from .random_cells import random_cells
from .recording import read_cells, record
from .wheel import wheel_files

__all__ = ["random_cells", "read_cells", "record", "wheel_files"]
