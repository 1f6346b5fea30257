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
    from .later import Later

    class _TensorType(type):
        def __instancecheck__(cls, value):
            return isinstance(value, torch.Tensor)

    class Tensor(metaclass=_TensorType):
        """Stands for `torch.Tensor` in annotations and `isinstance`."""

    torch = Later("torch")
    np = Later("numpy")

__all__ = ["Tensor", "np", "torch"]
