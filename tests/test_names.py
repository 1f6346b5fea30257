"""Names in the package: a class name means one thing, and a file's name says what the file holds."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "moectl"
VAGUE = {
    "about", "alike", "around", "beside", "fit", "found", "given", "here", "items", "joint", "keeping",
    "known", "misc", "names", "numbers", "opening", "parts", "preparing", "rest", "shown", "standing", "sums",
    "things", "turns", "util", "utils", "words",
}  # fmt: skip


def test_a_class_name_is_defined_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_file_has_a_vague_name() -> None:
    assert [path for path in PACKAGE.rglob("*.py") if path.stem in VAGUE] == []


def test_the_public_names_are_listed() -> None:
    import moectl

    assert set(dir(moectl)) == set(moectl.__all__) and all(hasattr(moectl, name) for name in moectl.__all__)


def test_kernel_families_have_one_word() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert [path for path, text in texts.items() if "regime" in text.lower()] == []
