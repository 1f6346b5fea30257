"""What makes Triton's interpreter faster, in a process that runs tests in it."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any


def replace_functions_once() -> None:
    """The interpreter replaces the language's functions once for each launch and module.

    By itself it does so again whenever a kernel calls a function, which changes nothing and takes a third of
    the time: it looks at every name of the language.
    """
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set[int]()

    def once(fn: FunctionType) -> Any:
        module = id(fn.__globals__)
        if module in replaced:
            return SimpleNamespace(restore=lambda: None)
        replaced.add(module)
        scope = replace(fn)
        restore = scope.restore

        def restored() -> None:
            # Only the launch's own scope is ever restored, at its end.
            restore()
            replaced.clear()

        scope.restore = restored
        return scope

    interpreter._patch_lang = once
