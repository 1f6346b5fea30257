"""Names in the package: a class name means one thing, and a file's name says what the file holds."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "moectl"
VAGUE = {
    "about", "alike", "around", "beside", "fit", "found", "given", "here", "items", "joint", "keeping",
    "known", "misc", "names", "numbers", "opening", "parts", "preparing", "rest", "shown", "standing", "sums",
    "things", "turns", "util", "utils", "words",
}  # fmt: skip


def defined_types(module: ast.Module) -> Iterator[str]:
    """Names of classes, and of aliases in CapWords; type variables mean what their function says."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in module.body:
        if isinstance(node, ast.Assign):
            call = node.value.func if isinstance(node.value, ast.Call) else None
            if not (isinstance(call, ast.Name) and call.id == "TypeVar"):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                yield from (name for name in names if re.fullmatch("[A-Z][a-z][A-Za-z0-9]*", name))


def test_the_name_of_a_type_is_defined_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in defined_types(ast.parse(path.read_text(encoding="utf-8"))):
            homes[name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_file_has_a_vague_name() -> None:
    assert [path for path in PACKAGE.rglob("*.py") if path.stem in VAGUE] == []


def test_the_public_names_are_listed() -> None:
    import moectl

    assert set(dir(moectl)) == set(moectl.__all__) and all(hasattr(moectl, name) for name in moectl.__all__)


def test_kernel_families_have_one_word() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert [path for path, text in texts.items() if "regime" in text.lower()] == []
