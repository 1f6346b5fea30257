"""A pytest plugin that writes what is collected, and each outcome as it comes, as lines of JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(os.environ["OUTCOME_LINES"])


def _write(**line: object) -> None:
    with FILE.open("a") as file:
        file.write(json.dumps(line) + "\n")


def function_of(nodeid: str) -> str:
    """``room/file.py::function`` of a case."""
    return nodeid.removeprefix("tests/").partition("[")[0]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(broken=report.nodeid.removeprefix("tests/"), text=str(report.longrepr)[-3000:])


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(cases=Counter(function_of(item.nodeid) for item in session.items))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown" or report.outcome != "passed":
        good = report.outcome == "passed"
        text = "" if good else f"{report.outcome}: {str(report.longrepr)[-3000:]}"
        _write(done=function_of(report.nodeid), case=report.nodeid, when=report.when, text=text)
