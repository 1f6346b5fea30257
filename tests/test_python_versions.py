"""What some Pythons that moectl supports compile wrongly, looked for in the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "moectl"
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp


def bound_names(function: Function) -> set[str]:
    """Return the names that a function's own body binds: parameters, assignments, nested definitions."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters += [one for one in (arguments.vararg, arguments.kwarg) if one]
    names = {one.arg for one in parameters}
    pending: list[ast.AST] = list(function.body) if isinstance(function.body, list) else [function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Lambda | Comprehension | ast.GeneratorExp):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return names


def shadowing_comprehensions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each comprehension in a nested function that rebinds an outer variable.

    CPython 3.12.0 to 3.12.3 and 3.13.0 inline comprehensions (PEP 709) and lose the outer variable where
    another nested function reads it: a NameError at run time.
    """

    def visit(node: ast.AST, enclosing: tuple[set[str], ...]) -> Iterator[tuple[int, str]]:
        if isinstance(node, Function):
            enclosing = (*enclosing, bound_names(node))
        if isinstance(node, Comprehension):
            outer = set().union(*enclosing[:-1]) if enclosing else set()
            for generator in node.generators:
                for target in ast.walk(generator.target):
                    if isinstance(target, ast.Name) and target.id in outer:
                        yield node.lineno, target.id
        for child in ast.iter_child_nodes(node):
            yield from visit(child, enclosing)

    return visit(tree, ())


def test_no_comprehension_shadows_an_enclosing_functions_variable() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line} rebinds {name!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in shadowing_comprehensions(ast.parse(path.read_text()))
    ]
    assert not found, "Python 3.12.1 and 3.13.0 compile these wrongly: " + "; ".join(found)


@pytest.mark.parametrize("brackets", ["[{}]", "{{{}}}"])
def test_the_shape_is_recognised(brackets: str) -> None:
    inner = brackets.format("x for name, x in items")
    source = f"def outer(name):\n def inner(items):\n  return {inner}, (lambda: name)\n return inner\n"
    assert list(shadowing_comprehensions(ast.parse(source))) == [(3, "name")]


def test_a_comprehension_of_the_outermost_function_is_fine() -> None:
    source = "def outer(name, items):\n return [name for name in items]\n"
    assert not list(shadowing_comprehensions(ast.parse(source)))
