"""torch and numpy that are imported when something of them is first used.

`moectl convert --dry-run` plans with the same records as a conversion, whose methods compute with torch.
Modules that it loads take `torch`, `Tensor` and `np` from here, so that planning works without either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    from importlib import import_module
    from types import ModuleType

    class _Later(ModuleType):
        """A module that is imported when an attribute is asked for; ModuleNotFoundError if absent."""

        def __getattr__(self, name):
            return getattr(import_module(self.__name__), name)

    class _TensorType(type):
        def __instancecheck__(cls, value):
            return isinstance(value, torch.Tensor)

    class Tensor(metaclass=_TensorType):
        """Stands for `torch.Tensor` in annotations and `isinstance`."""

    torch = _Later("torch")
    np = _Later("numpy")

__all__ = ["Tensor", "np", "torch"]
