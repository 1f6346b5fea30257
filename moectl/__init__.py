"""moectl: explain, convert, run and bench quantized Mixture-of-Experts layers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .building import build_kernel as build_kernel
    from .kernels.prepared import PreparedMoE as PreparedMoE
    from .prepare import load_prepared as load_prepared

__version__ = "0.1.0"

SCHEMA_VERSION = 1
"""Version of the JSON documents; it grows when a field changes its meaning or goes away."""

__all__ = ["SCHEMA_VERSION", "PreparedMoE", "__version__", "build_kernel", "load_prepared"]

_HEAVY = {"PreparedMoE": "kernels.prepared", "build_kernel": "building", "load_prepared": "prepare"}
"""Public names whose modules import torch, which `import moectl` does not."""


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HEAVY[name]}", __name__), name)
