"""scripts/sanitize_kernels without a sanitizer, in Triton's interpreter; `test_interpreter` runs it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from moectl.problem.moe_problem import Dims
from support.scripts import loaded


@pytest.mark.parametrize(
    ("name", "family", "tile"),
    [
        pytest.param("int4-g128-relu2", "moectl_marlin", "8x4", marks=pytest.mark.slow),
        ("fp8-channel", "decode", "16x64"),
    ],
)
def test_configurations_run_and_are_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, family: str, tile: str
) -> None:
    script = loaded("sanitize_kernels")
    monkeypatch.setitem(script.LAYERS, name, replace(script.LAYERS[name], dims=Dims(384, 256)))
    options = Namespace(formats=[name], families=[family], most=1, each=1, shipped=False, where=None)
    assert script.run_all(options, "cpu") == 0
    marks = [line.removeprefix("sanitize_kernels: ") for line in capsys.readouterr().out.splitlines()]
    assert len(marks) == 3 and marks[0].startswith(f"{name} {family} {tile}")
    assert marks[1].startswith("done, right, rms ") and marks[2] == "end"
