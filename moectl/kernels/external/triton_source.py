"""Triton kernels out of a source file of another project, without importing what that file imports."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from ...errors import CheckpointError, Unavailable
from ...files.safe_reading import read_bounded
from .import_library import first_line

LARGEST_FILE = 4 << 20
"""Bytes of a source file."""


def kernel_from(file: Path, name: str) -> Any:
    """The function `name` of `file`, which ``@triton.jit`` decorates, with those that it calls.

    Only these functions are compiled, with ``triton`` and ``tl`` as their globals; nothing else of the file
    is executed. Lines and the file's name are kept, from which Triton reads the source.

    Raises Unavailable if the file cannot be read, has no such function, or one that needs more than that.
    """
    functions = _jit_functions(file)
    if name not in functions:
        raise Unavailable(f"{file} has no Triton kernel {name}")
    needed: dict[str, ast.FunctionDef] = {}
    pending = [name]
    while pending:
        found = pending.pop()
        needed[found] = functions[found]
        called = {node.id for node in ast.walk(needed[found]) if isinstance(node, ast.Name)}
        pending += sorted((called & functions.keys()) - needed.keys())
    body: list[ast.stmt] = sorted(needed.values(), key=lambda function: function.lineno)
    namespace: dict[str, Any] = {"__name__": f"{__name__}.{file.stem}", "triton": triton, "tl": tl}
    try:
        exec(compile(ast.Module(body, []), str(file), "exec"), namespace)
    except Exception as error:  # a signature can raise anything
        raise Unavailable(f"the kernel {name} in {file} cannot be made: {first_line(error)}") from error
    return namespace[name]


def parameters_of(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's parameters, in order."""
    return tuple(kernel.arg_names)


def _jit_functions(file: Path) -> dict[str, ast.FunctionDef]:
    """The top-level functions with the one decorator ``@triton.jit`` and signatures that compute nothing."""
    try:
        tree = ast.parse(read_bounded(file, LARGEST_FILE, str(file)), str(file))
    except CheckpointError as error:
        raise Unavailable(error.what) from error
    except (SyntaxError, ValueError) as error:
        raise Unavailable(f"{file} cannot be read: {first_line(error)}") from error
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and [ast.unparse(decorator) for decorator in node.decorator_list] == ["triton.jit"]
        and _is_plain(node.args)
    }


def _is_plain(arguments: ast.arguments) -> bool:
    """Whether defaults are constants and annotations ``tl.constexpr``: these are evaluated."""
    given = [value for value in (*arguments.defaults, *arguments.kw_defaults) if value is not None]
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    notes = {ast.unparse(argument.annotation) for argument in every if argument.annotation is not None}
    return all(isinstance(value, ast.Constant) for value in given) and notes <= {"tl.constexpr"}
