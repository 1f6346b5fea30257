"""What passes by while vLLM selects a backend: its oracles' functions, called as they are and listened to.

Runs in the process of the release that is asked, without moectl.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from typing import Any


class Passing:
    """What one cell's path through vLLM shows: questions, refusals, the choice, sizes, errors."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the previous cell."""
        self.asked: list[Any] = []
        self.rejected: list[dict[str, Any]] = []
        self.priority: list[str] | None = None
        self.candidates: list[str] | None = None
        self.selected: str | None = None
        self.experts: Any = None
        self.functions: list[str] = []
        self.method: Any = None
        self.eplb: bool | None = None
        self.padded: tuple[int, int] | None = None
        self.stage = "select"
        self.depth = 0
        self.lists = 0

    # Hooks: each calls the original and keeps what went in and out.

    def selection(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that selects a backend and its experts class."""

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.functions.append(original.__name__)
            self.rejected, self.priority, self.candidates = [], None, None
            found = original(*args, **kwargs)
            # Before 0.20 the class was made later, after the weights are loaded.
            backend, self.experts = found if isinstance(found, tuple) else (found, None)
            self.selected = backend.value
            return found

        return hook

    def ranking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns backends in priority order; the outermost counts."""

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.lists += 1
            try:
                found = original(*args, **kwargs)
            finally:
                self.lists -= 1
            if not self.lists:
                self.priority = [backend.value for backend in found]
            return found

        return hook

    def filtering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function that drops backends with other activation formats."""

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self.candidates = [backend.value for backend in found]
            return found

        return hook

    def classes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns the experts classes of a backend, which are asked next."""

        @functools.wraps(original)
        def hook(backend: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(backend, *args, **kwargs)
            self.asked = [backend]
            for experts in found if isinstance(found, list) else [found]:
                for owner in experts.__mro__:
                    if "is_supported_config" in owner.__dict__:
                        self._watch(owner)
            return found

        return hook

    def incompatibility(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that refuses a backend before its classes are asked."""

        @functools.wraps(original)
        def hook(backend: Any, *args: Any, **kwargs: Any) -> Any:
            reason = original(backend, *args, **kwargs)
            if reason is not None:
                self.rejected.append({"backend": backend.value, "experts_cls": None, "reason": reason})
            return reason

        return hook

    def _watch(self, owner: type) -> None:
        original = inspect.getattr_static(owner, "is_supported_config")
        function = getattr(original, "__func__", original)
        if getattr(function, "watched", False):
            return

        @functools.wraps(function)
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                supported, reason = function(*args, **kwargs)
            finally:
                self.depth -= 1
            if not self.depth and not supported:
                experts = args[0] if args else kwargs["cls"]
                row = {"backend": self.asked[0].value, "experts_cls": experts.__name__, "reason": reason}
                self.rejected.append(row)
            return supported, reason

        hook.watched = True  # type: ignore[attr-defined]
        kind = classmethod if isinstance(original, classmethod) else staticmethod
        owner.is_supported_config = kind(hook)  # type: ignore[attr-defined]

    def install(self) -> None:
        """Hook the oracles' functions, wherever a module has them by name."""
        package = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle")
        oracles = [
            importlib.import_module(f"{package.__name__}.{found.name}")
            for found in pkgutil.iter_modules(package.__path__)
        ]
        hooks: dict[Any, Any] = {}
        for module in oracles:
            for name, value in list(vars(module).items()):
                make = self._hook_for(name)
                if make and inspect.isfunction(value):
                    hooks.setdefault(value, make(value))
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("vllm."):
                for name, value in list(vars(module).items()):
                    if inspect.isfunction(value) and value in hooks:
                        setattr(module, name, hooks[value])

    def _hook_for(self, name: str) -> Callable[..., Any] | None:
        if re.fullmatch(r"select_\w+_moe_backend", name):
            return self.selection
        if name.startswith("_get_priority_backends") or name == "prioritize_humming":
            return self.ranking
        if name == "_filter_by_activation":
            return self.filtering
        if name.endswith("backend_to_kernel_cls"):
            return self.classes
        if name == "_backend_incompatibility_reason":
            return self.incompatibility
        return None


CODES = (
    (r"current device", "device"),
    (r"activation format", "activation_format"),
    (r"quantization scheme", "quant_scheme"),
    (r"gemm type", "gemm_type"),
    (r"package", "package"),
    (r"Marlin not supported", "marlin_shape"),
    (r"only compressed-tensors|layout is not supported|asymmetric|group-wise scales", "layout"),
    (r"zero points and bias", "zero_points_or_bias"),
    (r"bias", "bias"),
    (r"zero points", "zero_points"),
    (r"activation ordering", "act_order"),
    (r"parallel config", "parallel"),
    (r"routing method", "routing_method"),
    (r"dimensions|number of experts|padded experts|hidden dim", "shape"),
    (r"MoEActivation|no act_and_mul| activation$|supports only SiLU", "activation"),
)
"""Words of a refusal, with the code that it is recorded under; the first that matches."""


def code_of(reason: str | None) -> str:
    """The code of a refusal in vLLM's words."""
    return next((code for words, code in CODES if re.search(words, reason or "")), "other")
