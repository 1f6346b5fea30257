"""Recording of SGLang's decisions: its own code from its wheel, run without a GPU."""

from .recording import DEVICES, record

__all__ = ["DEVICES", "record"]
