"""What makes Triton's interpreter faster, in a process that runs tests in it."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any


def hasten() -> None:
    """Leaves out of the interpreter what it computes again and again, or for nobody; values stay the same."""
    import triton

    _replace_functions_once()
    _leave_out_checks_that_nobody_reads()
    if triton.__version__.startswith("3.6."):
        _make_shapes_once()


def _replace_functions_once() -> None:
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


def _leave_out_checks_that_nobody_reads() -> None:
    """Sums and products of integers are not computed again in 64 bits to look for an overflow.

    The interpreter does so for an assertion that it makes only where `debug` is set, and never makes.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)


def _make_shapes_once() -> None:
    """Tensors of a shape share the record of it, which takes longer to make than most operations take.

    Written against Triton 3.6: constructors of two classes, without what they compute from the shape alone.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_type, np_dtype = core.block_type.__init__, interpreter._get_np_dtype
    types: dict[tuple[Any, ...], Any] = {}
    sizes: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    np_dtypes: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            types[key] = self
        else:
            self.element_ty, self.shape, self.numel = element_ty, known.shape, known.numel
            self.name = f"<{self.shape}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in sizes:
            make_tensor(self, handle, type)
            sizes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes[key]

    make_tensor = core.tensor.__init__

    def dtype_of(dtype: Any) -> Any:
        of = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        if of.name not in np_dtypes:
            np_dtypes[of.name] = np_dtype(of)
        return np_dtypes[of.name]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    interpreter._get_np_dtype = dtype_of
