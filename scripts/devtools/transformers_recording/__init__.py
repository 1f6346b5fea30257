"""Recording of decisions of transformers: its own code from its wheel, run without a GPU."""

from .experts_classes import experts_classes
from .recording import record

__all__ = ["experts_classes", "record"]
