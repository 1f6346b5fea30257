"""Outputs of a bench: rows on stdout in some format, in files by their suffixes, and as a plot."""

import shlex
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...cache.backend_times import current_name
from ...errors import UsageError
from ..options import option, pick, split_names
from ..output import Output, count, table
from ..output_paths import check_writable
from ..text_blocks import TONES, terminal_width

if TYPE_CHECKING:
    from ...bench.bench_rows import BenchRow
    from ...bench.engine_pick import EnginePick
    from ...bench.pivot import BackendLine, PivotTable, TableKey

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
            help="File instead of stdout; by suffix; repeatable; .jsonl by row.",
        ),
    ] = None
    plot: Annotated[Path | None, option("--plot", help="Draw latencies and ratios: .svg or .png.")] = None

    def output_of(self, as_json: bool) -> "RowOutput":
        """The outputs; UsageError for an unknown format, or one that contradicts ``--json``."""
        return RowOutput(
            stdout_format(self.format, self.output, as_json), tuple(self.output or ()), self.plot
        )


@dataclass(frozen=True)
class RowFilter:
    """Rows of a file that are asked for with ``--model``, ``--backend`` and ``-m``; empty: all of them."""

    models: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: str | None, backend: str | None, tokens: str | None) -> "RowFilter":
        """The filter from what was typed; UsageError for an empty name and bad numbers."""
        from ...bench import parse_counts

        return cls(
            tuple(split_names(model, "--model")) if model is not None else (),
            () if backend in (None, "all") else tuple(split_names(str(backend), "--backend")),
            parse_counts(tokens) if tokens is not None else (),
        )

    def pick(self, rows: "Sequence[BenchRow]", where: str) -> "tuple[BenchRow, ...]":
        """The rows of a file `where`; names in any case and with dashes. UsageError if none is left."""
        from ...bench.pivot import filtered

        models = [pick(name, {row.model for row in rows}, "model") for name in self.models]
        typed = [current_name(name.lower().replace("-", "_")) for name in self.backends]
        backends = [pick(name, {row.backend for row in rows}, "backend") for name in typed]
        found = filtered(rows, models, backends, self.tokens)
        if rows and not found:
            has = ", ".join(map(str, sorted({row.tokens for row in rows})))
            raise UsageError(f"{where} has no such rows", hint=f"it has M={has}")
        return found


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

    def show(
        self,
        about: Mapping[str, Any],
        rows: "Sequence[BenchRow]",
        out: Output,
        *,
        verbose: bool = False,
        printed: "Sequence[BenchRow]" = (),
    ) -> None:
        """Writes the files other than the journal, the plot, and stdout; `printed` rows are there already."""
        from ...bench.row_tables import brief, document
        from ...files.atomic import write_file

        for path in self.files:
            if path != self.journal:
                text = render(path.suffix.lstrip(".").lower(), about, rows, out)
                write_file(path, text.encode())
        if self.plot is not None:
            from ...bench.plot import draw

            pictures = draw(self.plot, about, rows)
            out.note(f"wrote {', '.join(map(str, pictures))}")
        if self.files:
            out.note(self._summary(rows))
        if self.stdout in ("md", "csv", "jsonl"):
            out.text(render(self.stdout, about, rows, out))
        elif self.stdout is not None:
            out.as_json = self.stdout == "json"
            if out.quiet and self.stdout == "table":
                known = {row.key for row in printed}
                if lines := [brief(row) for row in rows if row.key not in known]:
                    out.lines(lines)
                return

            def drawn(console: Any) -> None:
                if printed:
                    console.print()
                draw_summary(about, rows, console)
                if verbose:
                    console.print()
                    draw_table(about, rows, console)

            out.result(document(about, rows), drawn, [brief(row) for row in rows])
        elif out.quiet:
            out.lines(["\t".join(map(str, self.files))])

    def _summary(self, rows: "Sequence[BenchRow]") -> str:
        """A note on the contents of the files, and how to show them."""
        failed = sum(row.failed for row in rows)
        text = f"{count(len(rows), 'row')} in {', '.join(map(str, self.files))}"
        text += f", {failed} of them failed" if failed else ""
        readable = next((path for path in self.files if path.suffix.lower() in READABLE), None)
        if readable is None or self.stdout:
            return text
        return f"{text}; moectl bench --rows {shlex.quote(str(readable))} shows them"


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
    """Prints every row with its details, the costs of preparation, and the conditions of the measurement."""
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
        console.print(line)


MARK = "*"
"""What stands behind the backend that an engine would choose."""

StyledText = tuple[str, str]
"""Text and its tone."""


def print_row(row: "BenchRow", before: "Sequence[BenchRow]", out: Output) -> None:
    """Prints a row that has just been measured, after those `before`.

    That a backend does not support a layer is said once, unless quiet.
    """
    from ...bench.row_tables import brief, one_line

    if out.quiet:
        out.lines([brief(row)])
    elif not (row.refused and any(_same_refusal(row, other) for other in before)):
        width = terminal_width() if sys.stdout.isatty() else None
        out.draw(lambda console: console.print(one_line(row, width), style=TONES[_tone(row)], soft_wrap=True))


def _same_refusal(row: "BenchRow", other: "BenchRow") -> bool:
    parts = attrgetter("refused", "model", "layers", "scheme", "parallel", "backend")
    return bool(parts(row) == parts(other))


def _tone(row: "BenchRow") -> str:
    return "" if row.timed else "dim" if row.refused else "wrong"


def draw_summary(about: Mapping[str, Any], rows: "Sequence[BenchRow]", console: Any) -> None:
    """Prints one table per layer and routing: backends down, tokens across; then what they mean."""
    from ...bench.engine_pick import engine_picks
    from ...bench.pivot import pivot_tables, title
    from ...bench.row_tables import machine_line

    picks = engine_picks(rows, about)
    pivots = pivot_tables(rows)
    for _, tables in groupby(pivots, lambda pivot: pivot.key[:-1]):
        refused: dict[str, str] = {}
        for pivot in tables:
            refused |= pivot.refused
            if not pivot.lines:
                continue
            print_filled(f"{title(pivot.key)} (µs)", "strong", console)
            pick = picks.get(pivot.key)
            for line in grid(pivot_cells(pivot, pick.backend if pick else ""), terminal_width()):
                print_line(line, console)
            _print_failures(pivot, console)
            console.print()
        if refused:
            _print_refusals(pivot.key, refused, console)
            console.print()
    for text, tone in (*_legend(pivots, picks, about), (machine_line(about, rows), "dim")):
        print_filled(text, tone, console)


def _print_failures(pivot: "PivotTable", console: Any) -> None:
    from ...bench.row_tables import why_untimed

    failed = {line.backend: row for line in pivot.lines for row in line.rows.values() if row.failed}
    for backend, row in failed.items():
        words = "wrong result" if row.ok is False else "failed"
        reason = shortened(why_untimed(backend, row.reason))
        print_filled(f"{backend}, M={row.tokens}: {words}: {reason}", "wrong", console, "  ")


def _print_refusals(key: "TableKey", refused: Mapping[str, str], console: Any) -> None:
    """Backends that do not support a layer, those with the same reason in one line."""
    from ...bench.pivot import layer_title
    from ...bench.row_tables import why_untimed

    names: dict[str, list[str]] = {}
    for backend, reason in refused.items():
        names.setdefault(shortened(why_untimed(backend, reason)), []).append(backend)
    print_filled(f"Not supported on {layer_title(key)}:", "dim", console)
    for reason, backends in names.items():
        print_filled(f"{', '.join(backends)}: {reason}", "dim", console, "  ")


def _legend(
    pivots: "Sequence[PivotTable]", picks: "Mapping[TableKey, EnginePick]", about: Mapping[str, Any]
) -> Iterator[StyledText]:
    """What the tables' columns and marks mean, as far as they occur, and what an engine picks besides."""
    from ...bench.bench_rows import NOISY_SPREAD
    from ...bench.engine_pick import engine_words

    lines = [line for pivot in pivots for line in pivot.lines]
    partial = any(_partial(line, pivot) for pivot in pivots for line in pivot.lines)
    text = "times are per MoE layer"
    if any(line.ratio for line in lines):
        text += "; vs best: speed-up over the fastest other backend, geometric mean over M"
        text += "; ?: over some M only" if partial else ""
        text += "; references do not count" if any(line.reference for line in lines) else ""
    if lines:
        yield text, ""
    marked = {pivot.key for pivot in pivots for line in pivot.lines if _is_picked(line, picks.get(pivot.key))}
    if marked:
        yield f"{MARK} picked by {engine_words()} with its default packages", ""
    yield from ((text, "warning") for text in _unmeasured_picks(pivots, picks, marked, about))
    noisy = [row for line in lines for row in line.rows.values() if row.noisy]
    if noisy:
        worst = max(row.spread or 0 for row in noisy)
        text = f"~ noisy: interquartile range above {NOISY_SPREAD:.0%} of the median"
        yield f"{text} (up to {worst:.0%}); repeat with nothing else running", "warning"


def _partial(line: "BackendLine", pivot: "PivotTable") -> bool:
    return line.ratio is not None and line.shared < len(pivot.tokens)


def _is_picked(line: "BackendLine", pick: "EnginePick | None") -> bool:
    return pick is not None and line.backend == pick.backend


def _unmeasured_picks(
    pivots: "Sequence[PivotTable]",
    picks: "Mapping[TableKey, EnginePick]",
    marked: "Collection[TableKey]",
    about: Mapping[str, Any],
) -> Iterator[str]:
    """A sentence on each backend that an engine would choose and that has no line in a layer's tables."""
    from ...bench.engine_pick import engine_words

    settings = about.get("settings")
    asked = settings.get("backends") if isinstance(settings, Mapping) else None
    layers = {key[:-1] for key in marked}
    models: dict[EnginePick, dict[str, None]] = {}
    for pivot in pivots:
        pick = picks.get(pivot.key)
        if pick and pivot.key[:-1] not in layers and pick.backend not in (asked or ()):
            models.setdefault(pick, {})[pivot.key[0]] = None
    for pick, names in models.items():
        text = f"{engine_words()} picks {pick.title or pick.backend} for {', '.join(names)}: "
        if not pick.backend:
            yield text + "moectl cannot time it"
        elif asked:
            yield text + f"not timed, as --backend does not name {pick.backend}"
        elif any(pick.backend in pivot.refused for pivot in pivots if pivot.key[0] in names):
            yield text + f"{pick.backend} does not run here, see above"
        else:
            yield text + "not timed, as it is not installed here; install it, and run the bench again"


def shortened(text: str, most: int = 300) -> str:
    """`text` in one line of at most `most` characters; -v and files have all of it."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def print_filled(text: str, tone: str, console: Any, indent: str = "") -> None:
    """Prints `text` in lines that fit the terminal, the later ones indented further."""
    width = max(terminal_width(), 40)
    for line in textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  "):
        print_line([(line, tone)], console)


def pivot_cells(pivot: "PivotTable", pick: str) -> list[list[StyledText]]:
    """The cells of a table: backend, speed-up if there is any, share of the roofline, times."""
    from ...bench.row_tables import number

    compared = any(line.ratio for line in pivot.lines)
    heads = ["backend", *(["vs best"] if compared else []), "roofline"]
    heads += [f"M={tokens}" if i == 0 else str(tokens) for i, tokens in enumerate(pivot.tokens)]
    lines: list[list[StyledText]] = [[(head, "strong") for head in heads]]
    leader = pivot.lines[0].backend if pivot.lines[0].ratio else ""
    for line in pivot.lines:
        name = f"{line.backend} {MARK}" if line.backend == pick else line.backend
        name += " (reference)" if line.reference else ""
        tone = "good" if line.backend == leader else ""
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}x{'?' if _partial(line, pivot) else ''}"
        share = "-" if line.roofline is None else f"{line.roofline:.0%}"
        cells: list[StyledText] = [(name, tone), *([(ratio, tone)] if compared else []), (share, "")]
        for tokens in pivot.tokens:
            row = line.rows.get(tokens)
            if row is None:
                cells.append(("", ""))
            elif row.timed:
                best = pivot.best.get(tokens) == line.backend and len(pivot.lines) > 1
                shown = number(row.median_us) + ("~" if row.noisy else "")
                cells.append((shown, "good" if best else "warning" if row.noisy else ""))
            else:
                cells.append(("wrong" if row.ok is False else "failed", "wrong"))
        lines.append(cells)
    if pivot.roofline_us:
        floors = [(number(pivot.roofline_us.get(tokens)), "dim") for tokens in pivot.tokens]
        lines.append([("roofline", "dim"), *([("", "dim")] * (1 + compared)), *floors])
    return lines


def grid(lines: Sequence[Sequence[StyledText]], width: int) -> list[list[StyledText]]:
    """Aligned lines of at most `width` columns; what does not fit follows below, beside the first column.

    Columns are two blanks apart, or one if all of them fit only so.
    """
    widths = [max(len(line[i][0]) for line in lines) for i in range(len(lines[0]))]
    fits = {gap: 2 + sum(widths) + gap * (len(widths) - 1) <= width for gap in (1, 2)}
    gap = 1 if fits[1] and not fits[2] else 2
    parts: list[list[int]] = [[]]
    used = 2 + widths[0]
    for i in range(1, len(widths)):
        if parts[-1] and used + gap + widths[i] > width:
            parts.append([])
            used = 2 + widths[0]
        parts[-1].append(i)
        used += gap + widths[i]
    out: list[list[StyledText]] = []
    for part in parts:
        for line in lines:
            first = f"  {line[0][0]:<{widths[0]}}"
            out.append(
                [(first, line[0][1]), *((f"{'':{gap}}{line[i][0]:>{widths[i]}}", line[i][1]) for i in part)]
            )
    return out


def print_line(cells: Sequence[StyledText], console: Any) -> None:
    """Prints the cells of one line, each in its tone."""
    from rich.text import Text

    console.print(Text.assemble(*((text, TONES[tone]) for text, tone in cells)), soft_wrap=True)
