"""All printing: data to stdout, everything else to stderr, and every text `printable`.

Nothing else in the package writes to the terminal: whatever is drawn goes through the console that `Output`
makes, which makes each piece of text printable before it adds its own colours.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import SCHEMA_VERSION, __version__
from ..errors import MoectlError
from ..files.sizes import size as size
from ..printable import printable, printable_line
from ..whole_numbers import whole_number
from .text_layout import wrap

if TYPE_CHECKING:
    from ..convert.manifest.progress_log import Progress
    from .text_blocks import Table

COLORS = ("auto", "always", "never")
"""Choices of ``--color``."""

PLAIN = {"±": "+-", "µ": "u", "×": "x", "→": "->", "–": "-", "—": "-", "…": "...", "✔": "*", "≥": ">="}
"""Characters that have another spelling where an output's encoding lacks them."""

LABEL = len("moectl: ")
"""Columns by which further lines of a message on stderr are indented."""

WIDEST = 10_000
"""Width in columns when not on a terminal, so that no line is wrapped, and at most on one."""


class Output:
    """Renders results as rich tables, as one JSON document, or as a single line (`quiet`).

    Commands supply a plain document and a function that draws it; `Output` decides which one is shown.
    """

    def __init__(
        self, command: str, *, as_json: bool = False, quiet: bool = False, color: str = "auto"
    ) -> None:
        self.command = command
        self.as_json = as_json
        self.quiet = quiet
        self.color = color
        self._bar: Any = None
        for stream in (sys.stdout, sys.stderr):
            spell_out(stream)

    def result(
        self, document: dict[str, Any], draw: Callable[[Any], None], brief: str | Sequence[str] = ""
    ) -> None:
        """Prints one result: `document` as JSON, `brief` if quiet, else what `draw(console)` draws."""
        if self.as_json:
            self.text(self.json(document))
        elif self.quiet:
            self.lines([brief] if isinstance(brief, str) else brief)
        else:
            self.draw(draw)

    def draw(self, draw: Callable[[Any], None]) -> None:
        """Prints what `draw(console)` draws to stdout, in the form of text."""
        colored = uses_color(sys.stdout, self.color)
        if sys.stdout.isatty():
            # What is printed while there is a bar is the bar's console's to print, above it.
            draw(self._bar or _console(sys.stdout, colored))
        else:
            drawn = io.StringIO()
            draw(_console(drawn, colored))
            _write("\n".join(line.rstrip() for line in drawn.getvalue().splitlines()))

    def text(self, text: str) -> None:
        """Prints text that is already formatted to stdout."""
        _write(printable(text))

    def lines(self, lines: Sequence[str]) -> None:
        """Prints lines to stdout, of words and names that a tab may separate: none becomes two."""
        self.text("\n".join(line.replace("\n", "\\n") for line in lines))

    def note(self, message: str) -> None:
        """Prints a message that is not data to stderr, unless quiet."""
        if not self.quiet:
            self._say("moectl: ", message)

    def warn(self, message: str) -> None:
        """Prints a note, in yellow, on something that may make the result wrong or unwanted."""
        if not self.quiet:
            self._say("moectl: warning: ", message, "warning:", YELLOW)

    def _say(self, first: str, message: str, word: str = "", color: str = "") -> None:
        """Prints `message` to stderr after `first`, on a terminal wrapped between words.

        `word` is what is printed in `color` if stderr has colours.
        """
        message = printable(message)
        lines = [first + " ".join(message.splitlines())]
        if sys.stderr.isatty():
            lines = wrap(message, _stderr_width(), first, first if first.isspace() else " " * LABEL)
        if word and uses_color(sys.stderr, self.color):
            lines[0] = lines[0].replace(word, f"\x1b[{color}m{word}\x1b[0m", 1)
        print("\n".join(lines), file=sys.stderr)

    def error(self, error: MoectlError) -> None:
        """Prints an error to stderr, and with --json also as a JSON document to stdout."""
        self.complain(error)
        if self.as_json:
            self.text(self.json({"error": error.to_json()}))

    def complain(self, error: MoectlError) -> None:
        """Prints an error to stderr."""
        self._say("moectl: error: ", error.what, "error:", RED)
        for first, line in (("  ", error.reason), ("  next: ", error.hint)):
            if line:
                self._say(first, line)

    def usage(self, text: str) -> None:
        """Prints a page of help, in its own lines, to stderr."""
        print(printable(text), file=sys.stderr)

    def debug(self, error: BaseException) -> None:
        """Prints the traceback of an error to stderr."""
        print(printable("".join(traceback.format_exception(error))), file=sys.stderr, end="")

    def json(self, document: Mapping[str, Any], indent: int | None = 2) -> str:
        """`document` as JSON with its schema version; non-finite numbers become null."""
        head = {"schema_version": SCHEMA_VERSION, "moectl": __version__, "command": self.command}
        return json.dumps(_plain({**head, **document}), indent=indent, allow_nan=False)

    @contextmanager
    def progress(self, label: str, *, unit: str = "bytes") -> Iterator[Progress]:
        """Yields a progress callback: a bar with rate and ETA on a terminal, nothing elsewhere.

        Meanwhile SIGINT raises KeyboardInterrupt, so that unfinished output can be cleaned up.
        """
        with _interruptible():
            if self.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
                yield _silent
            else:
                console = _console(sys.stderr, uses_color(sys.stderr, self.color))
                with _bar(label, unit, console) as update:
                    self._bar = console
                    try:
                        yield update
                    finally:
                        self._bar = None


def print_logs_safely() -> None:
    """Makes what libraries log `printable`, whichever handlers they print it with, from here on.

    Each message begins with its library's name, and further lines are indented: what a server has a library
    say cannot pass for a message of moectl's.
    """
    import logging

    make = logging.getLogRecordFactory()

    def make_printable(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # a wrong format string: the handler reports that
            message = str(record.msg)
        library = record.name.partition(".")[0]
        record.msg, record.args = f"{library}: {_indented(message)}", ()
        if record.exc_info and record.exc_info[1]:
            record.exc_text = _indented("".join(traceback.format_exception(record.exc_info[1])).rstrip("\n"))
        return record

    logging.setLogRecordFactory(make_printable)


def _indented(text: str) -> str:
    """`text`, printable, with its further lines indented."""
    return printable(text).replace("\n", "\n  ")


def _write(text: str) -> None:
    """Writes text, printable but for its colours, to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def _silent(done: int, total: int, text: str = "") -> None:
    """A `Progress` that shows nothing."""


@contextmanager
def _bar(label: str, unit: str, console: Any) -> Iterator[Progress]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar
    from rich.table import Column

    # On a line that is too narrow for all of it, what is worked on is cut off first.
    columns: list[Any] = [TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))]
    columns += [BarColumn(bar_width=max(4, min(40, (console.width - 60) // 2)))] if console.width > 50 else []
    columns += [DownloadColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    columns += [TransferSpeedColumn()] if unit == "bytes" and console.width > 70 else []
    columns += [TimeRemainingColumn()]
    columns += [TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1))]
    with Bar(
        *columns, console=console, transient=True, expand=True, redirect_stdout=sys.stdout.isatty()
    ) as bar:
        task = bar.add_task(label, total=None, text="")

        def update(done: int, total: int, text: str = "") -> None:
            bar.update(task, completed=done, total=total, text=printable_line(text))

        yield update


@contextmanager
def _interruptible() -> Iterator[None]:
    """Within the context, SIGINT raises KeyboardInterrupt, whatever handler was set."""
    try:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # only the main thread gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def drop_stdout() -> None:
    """Redirects stdout to the null device, so that the interpreter can exit quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def table(
    *columns: str, title: str | None = None, right: Sequence[str] = (), optional: tuple[str, ...] = ()
) -> Table:
    """An empty table with these columns; those named in `right` are right-aligned.

    A terminal that is too narrow leaves out those named in `optional`, the first of them first.
    """
    from .text_blocks import Table

    return Table(columns, title or "", right, optional, piped=not sys.stdout.isatty())


def gib(nbytes: float) -> str:
    """Bytes of memory in binary units, as nvidia-smi and engines count: ``56.8 GiB``, ``24 MiB``."""
    value, unit = nbytes / 2**30, "GiB"
    for smaller in ("MiB", "KiB"):
        if abs(value) < 0.9995:
            value, unit = value * 1024, smaller
    return f"{value:.0f} {unit}" if abs(value) >= 99.95 else f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """A time with three significant digits: ``34.6 us``, ``1.37 ms``, ``2.3 s``."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds / 60:.0f} min"


def count(number: int, thing: str) -> str:
    """``1 file``, ``2 files``, ``2 classes``."""
    ending = "es" if thing.endswith("s") else "s"
    return f"{number} {thing}{'' if number == 1 else ending}"


YELLOW, RED = "33", "1;31"
"""Codes of terminals for colours of messages; those of results are `text_blocks.TONES`."""


def uses_color(stream: Any, choice: str = "auto") -> bool:
    """True if output to `stream` has colours.

    `choice` is one of `COLORS`. ``auto`` follows NO_COLOR, then FORCE_COLOR, then whether it is a terminal.
    """
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def spell_out(stream: Any) -> None:
    """Makes `stream` replace characters that its encoding lacks, by those of `PLAIN` or ``?``."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors=_SPELLED_OUT)


_SPELLED_OUT = "moectl-spelled-out"


def _spelled_out(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error(_SPELLED_OUT, _spelled_out)


def _stated_width() -> int | None:
    """Width in columns that ``COLUMNS`` states, at most `WIDEST`; None unless it is a number above 0."""
    return min(whole_number(os.environ.get("COLUMNS", "")) or 0, WIDEST) or None


def _stderr_width() -> int:
    """Width in columns of the terminal that is stderr: ``COLUMNS``, its own, or 80."""
    try:
        return _stated_width() or os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (ValueError, OSError):
        return 80


def _console(stream: Any, colored: bool) -> Any:
    """A rich console for `stream` on which text is text: no markup, no emoji, and all of it `printable`."""
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:  # the console's own, such as those of a bar
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    terminal = stream.isatty()
    return PrintableConsole(
        file=stream,
        width=_stated_width() if terminal else WIDEST,
        # rich fails on a width that is no number, and takes any other.
        _environ={name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")},
        color_system=("auto" if terminal and "FORCE_COLOR" not in os.environ else "standard")
        if colored
        else None,
        force_terminal=terminal or colored,
        no_color=not colored,
        markup=False,
        highlight=False,
        emoji=False,
    )


def _plain(value: Any) -> Any:
    """`value` in JSON's types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)
