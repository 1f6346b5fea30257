"""Sizes that a config states, and the word for what it does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LARGEST = 1 << 24
"""Upper bound of a size in a config, far above any model."""


class Untold(Exception):
    """The config does not say what a weight's size or format depends on."""


class StatedSizes:
    """Sizes in an object of a config; `Untold` for one that is absent or is no size."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __call__(self, *keys: str, default: int | None = None, low: int = 1) -> int:
        """The first of `keys` that is present, at least `low`; a dot separates nested keys."""
        for key in keys:
            value: Any = self.values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                if type(value) is not int or not low <= value <= _LARGEST:
                    raise Untold(key)
                return value
        if default is None:
            raise Untold(keys[0])
        return default
