"""Runs the kernel cases in Triton's interpreter, which has to be chosen before Triton is imported.

One process runs the cases of all files that are asked for: each would spend seconds on imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent


CASES = [
    "interpreted_batch.py",
    "interpreted_cases.py",
    "interpreted_marlin.py",
    "interpreted_peers.py",
    "interpreted_plain_gemm.py",
    "interpreted_prefill.py",
    "interpreted_router.py",
    "interpreted_routing.py",
    "interpreted_sanitize.py",
    "interpreted_stress.py",
    "interpreted_tuning.py",
    "interpreted_warpwise.py",
]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Mapping[str, str]]:
    """Of each file that a test asks for, its cases and what is wrong with each; empty when all is well."""
    asked = [item for item in request.session.items if item.path == request.path]
    files = [str(HERE / item.callspec.params["cases"]) for item in asked]  # type: ignore[attr-defined]
    root, report = HERE.parents[1], tmp_path_factory.mktemp("interpreted") / "report.xml"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *files],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert report.exists() and done.returncode in (0, 1), done.stdout[-6000:] + done.stderr[-2000:]
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # A file that cannot be imported is a case without a class, its name that of the file.
        name = case.get("name", "")
        file = (case.get("classname") or name).rpartition(".")[2]
        wrong = [
            f"{it.get('message')}\n{it.text}" for it in case if it.tag in ("failure", "error", "skipped")
        ]
        of_file = found.setdefault(f"{file}.py", {})
        of_file[name] = "\n".join([of_file.get(name, ""), *wrong]).strip()
    return found


@pytest.mark.parametrize("cases", CASES)
def test_kernels_in_the_interpreter(cases: str, outcomes: Mapping[str, Mapping[str, str]]) -> None:
    found = outcomes.get(cases, {})
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n\n".join(f"{name}: {text[-3000:]}" for name, text in wrong.items())
    assert found, f"no case of {cases} ran"
