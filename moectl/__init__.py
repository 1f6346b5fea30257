"""moectl: explain, convert, run and bench quantized Mixture-of-Experts layers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernels.prepared_layer import PreparedMoE as PreparedMoE
    from .layer.build_kernel import build_kernel as build_kernel
    from .layer.prepare import load_prepared as load_prepared

__version__ = "0.1.0"

SCHEMA_VERSION = 2
"""Version of the JSON documents; it is raised when a field changes its meaning or is removed."""

READABLE_SCHEMAS = (1, 2)
"""Versions that `explain --replay`, `explain --diff`, `bench --resume` and `compare` read."""

__all__ = ["SCHEMA_VERSION", "PreparedMoE", "__version__", "build_kernel", "load_prepared"]

_HEAVY = {
    "PreparedMoE": "kernels.prepared_layer",
    "build_kernel": "layer.build_kernel",
    "load_prepared": "layer.prepare",
}
"""Public names whose modules import torch, which `import moectl` does not."""


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HEAVY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
