"""Kernels out of source files: only what a kernel needs is made, and nothing else is executed."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from moectl.errors import Unavailable
from moectl.kernels.external.triton_source import kernel_from, parameters_of

SOURCE = '''"""A module that cannot be imported."""
import no_such_engine

raise SystemExit("executed")


@triton.jit
def inner(x):
    return x + 1


@triton.jit
def unused(x: elsewhere.Type):
    return x


@triton.jit
def outer(X, N, BLOCK: tl.constexpr, KIND: tl.constexpr = "plain"):
    tl.store(X, inner(tl.load(X)))
'''


def written(folder: Path, text: str) -> Path:
    file = folder / "kernels.py"
    file.write_text(text)
    return file


def test_a_kernel_is_made_with_what_it_calls(tmp_path: Path) -> None:
    kernel = kernel_from(written(tmp_path, SOURCE), "outer")
    assert parameters_of(kernel) == ("X", "N", "BLOCK", "KIND")
    assert kernel.fn.__globals__["inner"].fn.__code__.co_filename == str(tmp_path / "kernels.py")
    assert "unused" not in kernel.fn.__globals__ and "no_such_engine" not in kernel.fn.__globals__
    text, line = inspect.getsourcelines(kernel.fn)
    assert (
        "".join(text).startswith("@triton.jit\ndef outer(X")
        and line == SOURCE[: SOURCE.index("@triton.jit\ndef outer")].count("\n") + 1
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SOURCE.replace("def outer", "def other"), "has no Triton kernel outer"),
        (SOURCE.replace('= "plain"', "= print(1)"), "has no Triton kernel outer"),
        (SOURCE.replace("KIND: tl.constexpr", "KIND: print(1)"), "has no Triton kernel outer"),
        (
            SOURCE.replace("@triton.jit\ndef outer", "@triton.jit(debug=print(1))\ndef outer"),
            "no Triton kernel",
        ),
        (SOURCE + "    !", "cannot be read: SyntaxError"),
        ("\0" + SOURCE, "cannot be read"),
    ],
)
def test_another_source_is_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unavailable, match=says):
        kernel_from(written(tmp_path, text), "outer")
    assert capsys.readouterr().out == ""


def test_files_that_are_no_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="cannot be read: No such file"):
        kernel_from(tmp_path / "absent.py", "outer")
    monkeypatch.setattr("moectl.kernels.external.triton_source.LARGEST_FILE", 10)
    with pytest.raises(Unavailable, match="expected at most 10"):
        kernel_from(written(tmp_path, SOURCE), "outer")
