"""Explain, convert, run and bench quantized Mixture-of-Experts layers.

    >>> import moectl
    >>> moectl.explain("openai/gpt-oss-120b", "h200", offline=True).groups[0].decision.chosen.backend.name
    'triton'

`explain` and `open_checkpoint` need no torch; the other functions do (``moectl[run]``).
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import bench as bench
    from .api import convert as convert
    from .api import explain as explain
    from .checkpoint.checkpoint import Checkpoint as Checkpoint
    from .checkpoint.source.open_checkpoint import open_checkpoint as open_checkpoint
    from .errors import MoectlError as MoectlError
    from .explain.explanation import Explanation as Explanation
    from .kernels.prepared_layer import PreparedMoE as PreparedMoE
    from .layer.build_kernel import build_kernel as build_kernel
    from .layer.prepare import load_prepared as load_prepared
    from .layer.refit import refit as refit
    from .parity.parameter_dump import dump_parameters as dump_parameters

__version__ = "0.1.0"

SCHEMA_VERSION = 2
"""Version of the JSON documents; it is raised when a field changes its meaning or is removed."""

READABLE_SCHEMAS = (1, 2)
"""Versions that `explain --replay`, `explain --diff`, `bench --resume` and `compare` read."""

__all__ = [
    "SCHEMA_VERSION",
    "Checkpoint",
    "Explanation",
    "MoectlError",
    "PreparedMoE",
    "__version__",
    "bench",
    "build_kernel",
    "convert",
    "dump_parameters",
    "explain",
    "load_prepared",
    "open_checkpoint",
    "refit",
]

_LATER = {
    "Checkpoint": "checkpoint.checkpoint",
    "Explanation": "explain.explanation",
    "MoectlError": "errors",
    "PreparedMoE": "kernels.prepared_layer",
    "build_kernel": "layer.build_kernel",
    "dump_parameters": "parity.parameter_dump",
    "load_prepared": "layer.prepare",
    "open_checkpoint": "checkpoint.source.open_checkpoint",
    "refit": "layer.refit",
}
"""Public names, and the modules that have them, which are imported when a name is asked for."""

_FUNCTIONS = ("bench", "convert", "explain")
"""Functions of `moectl.api` whose names subpackages have, too: those subpackages can be called."""


class _CallableModule(ModuleType):
    """A subpackage that is also a function of `moectl.api`."""

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._function())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    def _function(self) -> Any:
        from . import api

        return getattr(api, self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package: an import of a subpackage named in `_FUNCTIONS` binds it here as a callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FUNCTIONS and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _FUNCTIONS:
        return import_module(f".{name}", __name__)
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
