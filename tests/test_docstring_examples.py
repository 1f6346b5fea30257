"""Examples in docstrings print what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import moectl

PACKAGE = Path(moectl.__file__).parent
GPU_LIBRARIES = ("humming", "triton_kernels", "vllm", "cutlass")
"""Packages that a module of moectl may need at import and that only GPU machines have."""


def modules() -> list[str]:
    """Every module of the package but its `__main__`, whose import is a command."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def written_examples(name: str) -> int:
    """How many prompts a module's source shows, counted in its text."""
    source = PACKAGE.parent.joinpath(*name.split("."))
    path = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    return sum(line.lstrip().startswith(">>> ") for line in path.read_text(encoding="utf-8").splitlines())


WITH_EXAMPLES = [name for name in modules() if written_examples(name)]


def examples_of(name: str) -> list[doctest.DocTest]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in GPU_LIBRARIES:
            pytest.skip(f"{name} needs {error.name}, which is installed on machines with a GPU alone")
        raise
    return [found for found in doctest.DocTestFinder().find(module, name) if found.examples]


def failures(tests: list[doctest.DocTest]) -> str:
    """What examples printed that differs from what they show; empty where all agree."""
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples run in an empty folder; none is hidden from doctest by a place that it does not search."""
    monkeypatch.chdir(tmp_path)
    tests = examples_of(name)
    shown = sum(example.source.count("\n") for test in tests for example in test.examples)
    assert shown >= written_examples(name), "doctest does not reach an example, such as one below a wrapper"
    report = failures(tests)
    assert not report, report


def test_a_wrong_example_is_seen() -> None:
    parsed = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert "Expected:\n    3\nGot:\n    2" in failures([parsed])
