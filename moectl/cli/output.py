"""The one place that prints: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import __version__
from ..errors import MoectlError

SCHEMA_VERSION = 1
"""Version of the JSON documents; it grows when a field changes its meaning or goes away."""

PIPE_WIDTH = 160
"""Columns of tables when stdout is not a terminal."""

Progress = Callable[[int, int, str], None]
"""Called with work done, work in all, and what is being worked on."""


class Output:
    """Renders results as rich tables, as one JSON document, or as a single line (`quiet`).

    Commands build a plain document and a function that draws it; which of the two is shown is
    decided here.
    """

    def __init__(self, command: str, *, as_json: bool = False, quiet: bool = False) -> None:
        self.command = command
        self.as_json = as_json
        self.quiet = quiet

    def result(
        self, document: dict[str, Any], draw: Callable[[Any], None], brief: str | Sequence[str] = ""
    ) -> None:
        """Print one result: `document` as JSON, `brief` when quiet, else what `draw(console)` draws."""
        if self.as_json:
            self._json(document)
        elif self.quiet:
            for line in [brief] if isinstance(brief, str) else brief:
                print(line)
        else:
            draw(_console(sys.stdout))
        sys.stdout.flush()

    def text(self, text: str) -> None:
        """Print text that is already in its final format to stdout."""
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()

    def note(self, message: str) -> None:
        """Tell a person something that is not data (stderr; silent when quiet)."""
        if not self.quiet:
            print(f"moectl: {message}", file=sys.stderr)

    def error(self, error: MoectlError) -> None:
        """Explain an error on stderr, and as a JSON document on stdout when JSON was asked for."""
        print(f"moectl: error: {error.what}", file=sys.stderr)
        for line in (error.reason, error.hint and f"next: {error.hint}"):
            if line:
                print(f"  {line}", file=sys.stderr)
        if self.as_json:
            self._json(
                {
                    "error": {
                        "what": error.what,
                        "reason": error.reason,
                        "hint": error.hint,
                        "exit_code": int(error.exit_code),
                    }
                }
            )

    @contextmanager
    def progress(self, label: str, *, unit: str = "bytes") -> Iterator[Progress]:
        """Yield a progress callback: a bar with rate and ETA on a terminal, nothing elsewhere."""
        if self.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":

            def silent(done: int, total: int, text: str = "") -> None:
                pass

            yield silent
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        columns: list[Any] = [TextColumn("{task.description}"), BarColumn()]
        columns += [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        columns += [TimeRemainingColumn(), TextColumn("{task.fields[text]}")]
        with Bar(*columns, console=_console(sys.stderr), transient=True) as bar:
            task = bar.add_task(label, total=None, text="")

            def update(done: int, total: int, text: str = "") -> None:
                bar.update(task, completed=done, total=total, text=text)

            yield update

    def _json(self, document: dict[str, Any]) -> None:
        head = {"schema_version": SCHEMA_VERSION, "moectl": __version__, "command": self.command}
        print(json.dumps({**head, **document}, indent=2, default=_plain))


def table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Any:
    """An empty rich table with these columns; those named in `right` are right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if sys.stdout.isatty() else box.MARKDOWN,
        pad_edge=not sys.stdout.isatty(),
    )
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def size(nbytes: float) -> str:
    """Bytes in decimal units with three significant digits: ``1.69 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def ranges(numbers: Sequence[int]) -> str:
    """Layer numbers in short: ``0-23``, ``1-60``, ``0, 2, 4-7``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _console(stream: Any) -> Any:
    from rich.console import Console

    terminal = stream.isatty()
    width = None if terminal or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False)


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    return str(value)
