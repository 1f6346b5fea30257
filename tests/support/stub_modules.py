"""Modules of stand-ins, for libraries that are not installed."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def install_modules(
    monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]], afresh: str
) -> None:
    """Make modules with these names and contents importable; modules below the package `afresh` load anew."""
    parents = {
        ".".join(name.split(".")[:depth]) for name in contents for depth in range(1, name.count(".") + 1)
    }
    for name in sorted(parents | set(contents)):
        module = ModuleType(name)
        module.__path__ = []
        for key, value in contents.get(name, {}).items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    for name in [name for name in sys.modules if name.startswith(f"{afresh}.")]:
        parent, _, leaf = name.rpartition(".")
        if hasattr(sys.modules.get(parent), leaf):
            monkeypatch.setattr(sys.modules[parent], leaf, sys.modules[name])  # restored with the module
        monkeypatch.delitem(sys.modules, name)
