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
        _leave_equal_shapes_alone()
        _name_tuples_when_asked()


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
    types: dict[tuple[Any, ...], tuple[Any, str]] = {}
    shapes: dict[int, tuple[Any, str]] = {}
    sizes: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    np_dtypes: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        # Most shapes are those of another type.
        found = shapes.get(id(shape))
        if found is None:
            key = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
            found = types.get(key)
            if found is None:
                make_type(self, element_ty, shape)
                # Kept, so that no other shape comes to have its id.
                types[key] = shapes[id(self.shape)] = self, str(self.shape)
                return
        known, text = found
        self.element_ty, self.shape, self.numel = element_ty, known.shape, known.numel
        self.name = f"<{text}, {element_ty}>"

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


def _leave_equal_shapes_alone() -> None:
    """Operands of one shape, or without one, are not looked at size by size to find out that they have it."""
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if blocks == (False, False) or (blocks == (True, True) and lhs.type.shape is rhs.type.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = unless_equal


def _name_tuples_when_asked() -> None:
    """The name of a tuple's type, which has those of all its parts, is spelled where it is read."""
    from triton.language import core

    def tuple_type(self: Any, types: Any, fields: Any = None) -> None:
        self.types = types
        self.fields = fields or [""] * len(types)

    def name(self: Any) -> str:
        return "[" + ",".join(f"{k}:{v}" for k, v in zip(self.fields, self.types, strict=False)) + "]"

    core.tuple_type.__init__, core.tuple_type.name = tuple_type, property(name)
