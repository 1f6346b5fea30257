"""scripts/sanitize_kernels without a sanitizer, in Triton's interpreter; `test_interpreter` runs it."""

from __future__ import annotations

from argparse import Namespace

import pytest

from support.scripts import loaded


def test_configurations_run_and_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    options = Namespace(
        formats=["int4-g128-relu2"], families=["triton_marlin"], most=1, each=1, shipped=False
    )
    assert loaded("sanitize_kernels").run_all(options, "cpu") == 0
    marks = [line.removeprefix("sanitize_kernels: ") for line in capsys.readouterr().out.splitlines()]
    assert len(marks) == 3 and marks[0].startswith("int4-g128-relu2 triton_marlin 8x4")
    assert marks[1].startswith("done, right, rms ") and marks[2] == "end"
