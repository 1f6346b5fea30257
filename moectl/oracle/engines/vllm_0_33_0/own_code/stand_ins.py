"""Stand-ins for what a machine without GPUs and without most dependencies lacks when it imports an engine.

They let an engine's modules be imported; no decision may depend on one, except through the answers that
the package profile gives. Standard library only: this runs before anything else is imported.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import re
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Anything,), {})
        setattr(cls, name, made)
        return made

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return Any

    def __ror__(cls, other: Any) -> Any:
        return Any


class _Anything(metaclass=_Meta):
    """Can be called, subclassed, subscripted and used as a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (_Anything,), {})
        if self.__name__.startswith("openai.types") and "Param" in name:
            make: Any = importlib.import_module("typing_extensions").TypedDict
            made = make(name, {})
        setattr(self, name, made)
        return made


class StandIns:
    """A finder that answers for whole packages: those in `packages`, and compiled modules that match.

    It comes before the real finders, so a package in `packages` is never the real one.
    """

    def __init__(self, packages: Iterable[str], compiled: str) -> None:
        self.packages = set(packages)
        self.compiled = re.compile(compiled)

    def install(self) -> None:
        """Put it before every other finder."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A module that has every name, for a package or compiled module that this stands in for."""
        if name.split(".")[0] in self.packages or self.compiled.fullmatch(name):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The module, without contents."""
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "99.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""
