"""Runs the kernel cases in Triton's interpreter, which has to be chosen before Triton is imported.

One process runs all cases that are asked for: each process would spend seconds on imports. It writes outcomes
as they come, and each test here waits for those of one function.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LONGEST = 1200.0
"""Seconds after which a process that wrote nothing more has hung."""


def functions_in(file: Path) -> list[str]:
    """The test functions of a file, which cannot be imported here."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [it.name for it in tree.body if isinstance(it, ast.FunctionDef) and it.name.startswith("test_")]


CASES = [
    f"{file.relative_to(TESTS)}::{function}"
    for file in sorted(TESTS.rglob("interpreted_*.py"))
    if file.name != "interpreted_passes.py"
    for function in functions_in(file)
]


@dataclass
class Interpreter:
    """The process that runs the cases, and the file of its outcomes."""

    process: subprocess.Popen[bytes]
    lines: Path
    output: Path

    def outcomes(self) -> list[dict[str, object]]:
        """All that was written up to now; a line that is being written does not count."""
        text = self.lines.read_text(encoding="utf-8") if self.lines.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, function: str) -> tuple[int, list[str]]:
        """How many cases of a function ran, and what is wrong with each that is not well."""
        last, size = time.monotonic(), -1
        while True:
            over = self.process.poll() is not None
            found = self.outcomes()
            broken = [str(it["text"]) for it in found if it.get("broken") == function.partition("::")[0]]
            wanted = next((it["cases"].get(function, 0) for it in found if "cases" in it), None)  # type: ignore[attr-defined]
            mine = [it for it in found if it.get("done") == function]
            ended = sum(it["when"] == "teardown" for it in mine)
            wrong = broken + [f"{it['case']}: {it['text']}" for it in mine if it["text"]]
            if broken or (wanted is not None and ended >= wanted):
                return ended, wrong
            if over:
                return ended, [*wrong, f"the process ended early: {self.output.read_text()[-6000:]}"]
            if len(found) != size:
                last, size = time.monotonic(), len(found)
            assert time.monotonic() - last < LONGEST, "the interpreter hangs"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def interpreter(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Interpreter]:
    asked = [item.callspec.params["cases"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    root, folder = TESTS.parent, tmp_path_factory.mktemp("interpreted")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests"))),
        "OUTCOME_LINES": str(folder / "outcomes.jsonl"),
    }
    environment.pop("PYTEST_ADDOPTS", None)
    slow = request.config.getoption("--slow")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "support.outcome_lines"]
    options += ["--continue-on-collection-errors", *(["--slow"] if slow else ["-m", "not slow"])]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *(str(TESTS / name) for name in asked)],
            cwd=root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Interpreter(process, folder / "outcomes.jsonl", folder / "output")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("cases", CASES)
def test_kernels_in_the_interpreter(cases: str, interpreter: Interpreter) -> None:
    ran, wrong = interpreter.wait_for(cases)
    assert not wrong, "\n\n".join(wrong)
    assert ran, f"no case of {cases} ran"
