"""Values that a runner derived from a layer's tensors, brought up to date in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor


def renew(old: object, new: object) -> None:
    """Copies tensors of the structure `new` over those at the same place of `old` that are other tensors."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in old:
            renew(old[key], new[key])
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        for a, b in zip(old, new, strict=True):
            renew(a, b)
    elif is_dataclass(old) and is_dataclass(new):
        for field in fields(old):
            renew(getattr(old, field.name), getattr(new, field.name))
