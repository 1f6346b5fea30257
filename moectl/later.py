"""Modules that are imported when something of them is first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """The module of this name, imported when an attribute is asked for; ModuleNotFoundError if it is absent.

    Kernels are in such modules: Triton reads the source of each of their functions, which takes a process a
    third of a second for all families, and a layer launches few of them.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)
