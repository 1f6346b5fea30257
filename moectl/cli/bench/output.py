"""Outputs of a bench: rows on stdout in some format, in files by their suffixes, and as a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...errors import UsageError
from ..options import option, pick
from ..output import Output, count, table
from ..output_paths import check_writable

if TYPE_CHECKING:
    from ...bench.bench_rows import BenchRow

FORMATS = ("md", "csv", "json", "jsonl")
READABLE = (".jsonl", ".json", ".csv")
"""Suffixes of files that ``--rows`` reads."""


@dataclass(frozen=True)
class RowOutputOptions:
    """Options for the outputs."""

    format: Annotated[
        str | None, option("--format", help="md, csv, json or jsonl on stdout.", show_default=False)
    ] = None
    output: Annotated[
        list[Path] | None,
        option(
            "--output",
            "-o",
            own=True,
            help="File in the format of its suffix, instead of stdout; repeatable; .jsonl row by row.",
        ),
    ] = None
    plot: Annotated[Path | None, option("--plot", help="Draw latency and roofline: .svg or .png.")] = None

    def output_of(self, as_json: bool) -> "RowOutput":
        """The outputs; UsageError for an unknown format, or one that contradicts ``--json``."""
        return RowOutput(
            stdout_format(self.format, self.output, as_json), tuple(self.output or ()), self.plot
        )


def stdout_format(format: str | None, output: Sequence[Path] | None, as_json: bool) -> str | None:
    """The format of stdout: `format`, or that of ``--json``; else ``table``; None if rows go to files only.

    Raises UsageError for an unknown format, and one that contradicts ``--json``.
    """
    if format is not None:
        format = pick(format, FORMATS, "format")
    if as_json and format not in (None, "json"):
        raise UsageError(f"--json and --format {format} ask for two formats", hint="leave one of them out")
    if as_json:
        return "json"
    return format or (None if output else "table")


@dataclass(frozen=True)
class RowOutput:
    """The outputs: the format of stdout (None: nothing), files by their suffixes, and a plot."""

    stdout: str | None
    files: tuple[Path, ...]
    plot: Path | None

    @property
    def journal(self) -> Path | None:
        """The file that rows are appended to as they are measured."""
        return next((path for path in self.files if path.suffix.lower() == ".jsonl"), None)

    def check(self, reads: Sequence[str | Path]) -> None:
        """Raises if an output cannot be written, or would overwrite a file that the command `reads`."""
        for path in self.files:
            if path.suffix.lstrip(".").lower() not in FORMATS:
                raise UsageError(
                    f"the suffix of {path} names no format, expected one of {', '.join(FORMATS)}",
                    hint="give -o rows.jsonl",
                )
            check_writable(path, reads, journal=path == self.journal)
        if sum(path.suffix.lower() == ".jsonl" for path in self.files) > 1:
            raise UsageError("rows are appended to one .jsonl file as they are measured, got several")
        if self.plot is not None:
            from ...bench.plot import check_plot

            check_writable(self.plot, reads)
            check_plot(self.plot)

    def show(self, about: Mapping[str, Any], rows: "Sequence[BenchRow]", out: Output) -> None:
        """Writes the files other than the journal, the plot, and stdout."""
        from ...bench.row_tables import brief, document
        from ...files.atomic import write_file

        for path in self.files:
            if path != self.journal:
                text = render(path.suffix.lstrip(".").lower(), about, rows, out)
                write_file(path, text.encode())
        if self.plot is not None:
            from ...bench.plot import draw

            draw(self.plot, about, rows)
            out.note(f"wrote {self.plot}")
        if self.files:
            out.note(self._summary(rows))
        if self.stdout in ("md", "csv", "jsonl"):
            out.text(render(self.stdout, about, rows, out))
        elif self.stdout is not None:
            out.as_json = self.stdout == "json"
            lines = [brief(row) for row in rows]
            out.result(document(about, rows), lambda console: draw_table(about, rows, console), lines)
        elif out.quiet:
            out.text("\t".join(map(str, self.files)))

    def _summary(self, rows: "Sequence[BenchRow]") -> str:
        """A note on the contents of the files, and how to show them."""
        failed = sum(row.failed for row in rows)
        text = f"{count(len(rows), 'row')} in {', '.join(map(str, self.files))}"
        text += f", {failed} of them failed" if failed else ""
        readable = next((path for path in self.files if path.suffix.lower() in READABLE), None)
        return (
            text if readable is None or self.stdout else f"{text}; moectl bench --rows {readable} shows them"
        )


def render(format: str, about: Mapping[str, Any], rows: "Sequence[BenchRow]", out: Output) -> str:
    """The whole result in one of `FORMATS`."""
    from ...bench.row_tables import as_csv, document, markdown

    if format == "json":
        return out.json(document(about, rows)) + "\n"
    if format == "jsonl":
        lines = [{"kind": "run", **about}, *({"kind": "row", **row.to_json()} for row in rows)]
        return "".join(out.json(line, indent=None) + "\n" for line in lines)
    return markdown(about, rows) if format == "md" else as_csv(about, rows)


def draw_table(about: Mapping[str, Any], rows: "Sequence[BenchRow]", console: Any) -> None:
    """Prints tables of times and costs, the conditions of the measurement, and latency as a text plot."""
    from ...bench.plot import text_plots
    from ...bench.row_tables import COLUMNS, COSTS, cost_rows, footer, supported, used_columns

    for columns, column_rows in ((COLUMNS, supported(rows)), (COSTS, cost_rows(rows))):
        if not column_rows:
            continue
        used = used_columns(columns, column_rows)
        drawn = table(*(c.title for c in used), right=[c.title for c in used if c.number])
        for row in column_rows:
            drawn.add_row(*(column.text(row) for column in used))
        console.print(drawn)
    for line in footer(about, rows):
        console.print(line, markup=False)
    plots = text_plots(rows)
    if plots:
        console.print("\n" + plots, markup=False)
