"""`moectl compare`: two runs of `moectl bench`, compared case by case."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.compare_runs import REGRESSIONS, UNCHANGED, VERDICTS
from ..errors import ExitCode
from .bench.output import RowFilter, StyledText, grid, print_filled, print_line, shortened
from .options import framed, option
from .output import Output, count
from .text_blocks import terminal_width

if TYPE_CHECKING:
    from ..bench.bench_rows import BenchRow
    from ..bench.compare_runs import CaseVerdict, RunComparison

EXAMPLES = (
    "moectl compare before.jsonl after.jsonl",
    "moectl compare main.csv branch.csv --threshold 0.05 --json",
)
MORE = (
    "Verdicts (exit code 1: " + ", ".join(REGRESSIONS) + "):",
    *(f"  {word:<8} {meaning}" for word, meaning in VERDICTS.items()),
)


@framed("compare")
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Rows: .jsonl, .json or .csv.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Rows of a later run.")],
    threshold: Annotated[
        float, option("--threshold", own=True, help="Relative change that matters.", min=0.0, max=10.0)
    ] = 0.02,
    model: Annotated[str | None, option("--model", own=True, help="Only these models.")] = None,
    backend: Annotated[str | None, option("--backend", own=True, help="Only these backends.")] = None,
    tokens: Annotated[str | None, option("--tokens", "-m", own=True, help="Only these token counts.")] = None,
    verbose: Annotated[bool, option("--verbose", "-v", help="Every case, with tactics.")] = False,
    *,
    out: Output,
) -> ExitCode:
    """Compare two runs of a bench.

    Case by case, with verdicts that take noise into account. Exit code 1 if a case became slower or lost its
    time, or the runs have no case in common.
    """
    from ..bench import compare_runs as library
    from ..bench.read_rows import read_rows

    wanted = RowFilter.of(model, backend, tokens)
    earlier, later = read_rows(before), read_rows(after)
    both = wanted.pick((*earlier.rows, *later.rows), f"{before} and {after}")
    keys = {row.key for row in both}
    earlier, later = (
        replace(run, rows=tuple(row for row in run.rows if row.key in keys)) for run in (earlier, later)
    )
    comparison = library.compare(earlier, later, threshold)
    document = {"before": str(before), "after": str(after), **library.document(comparison, threshold)}
    summary = ", ".join(f"{number} {word}" for word, number in comparison.counts.items()) or "no rows"
    out.result(document, lambda console: _draw(comparison, summary, verbose, console), summary)
    return ExitCode.FOUND if comparison.regressed else ExitCode.DONE


_TONES = {"faster": "good", "fixed": "good", **dict.fromkeys(REGRESSIONS, "wrong"), "removed": "dim"}


def _draw(comparison: "RunComparison", summary: str, verbose: bool, console: Any) -> None:
    shown = comparison.changed
    if verbose:
        shown = (*shown, *(verdict for verdict in comparison.verdicts if verdict.word in UNCHANGED))
    if shown:
        for line in _lines(shown, [verdict.row for verdict in comparison.verdicts], verbose):
            print_line(line, console)
    for verdict in shown:
        if verdict.row.reason and (verbose or verdict.word in REGRESSIONS):
            row = verdict.row
            where = f"{row.backend} on {row.model}, M={row.tokens}"
            print_filled(f"{where}: {shortened(row.reason)}", "dim", console, "  ")
    for note in comparison.notes:
        print_filled(f"note: {note}", "warning", console)
    mean = "" if comparison.ratio is None else f"; B/A {comparison.ratio:.3f}, geometric mean"
    print_filled(f"{count(len(comparison.verdicts), 'case')}: {summary}{mean}", "strong", console)


def _lines(
    shown: "Sequence[CaseVerdict]", rows: "Sequence[BenchRow]", verbose: bool
) -> "Iterator[list[StyledText]]":
    """The table of cases; where it is too wide, each case's numbers are below what identifies it."""
    cells, named = _cells(shown, rows, verbose)
    width = terminal_width()
    lines = grid(cells, width)
    if len(lines) == len(cells):
        yield from lines
        return
    numbers = grid([line[named:] for line in cells], width)
    yield numbers[0]
    for i, line in enumerate(cells[1:], 1):
        words = " ".join(" ".join(text for text, _ in line[:named]).split())
        yield [(words, "")]
        yield from numbers[i :: len(cells)]


def _cells(
    shown: "Sequence[CaseVerdict]", rows: "Sequence[BenchRow]", verbose: bool
) -> "tuple[list[list[StyledText]], int]":
    """The table of cases and the number of its columns that identify them, of those that differ in `rows`."""
    from ..bench.row_tables import ROUTED, number

    columns = [c for c in ROUTED if len({c.text(row) for row in rows}) > 1]
    if len({(row.model, row.scheme) for row in rows}) == len({row.model for row in rows}):
        columns = [c for c in columns if c.title != "scheme"]
    named = [*(c.title for c in columns), "backend"]
    tactics = ("tactic",) if verbose and any(map(_tactics, shown)) else ()
    lines: list[list[StyledText]] = []
    for verdict in shown:
        times = [number(row.median_us if row else None, 4) for row in (verdict.before, verdict.after)]
        ratio = "-" if verdict.ratio is None else f"{verdict.ratio:.3f}"
        identity = [*(column.text(verdict.row) for column in columns), verdict.row.backend]
        texts = (*identity, str(verdict.row.tokens), *times, ratio)
        word = (verdict.word, _TONES.get(verdict.word, ""))
        lines.append([*((text, "") for text in texts), word, *((_tactics(verdict), "dim") for _ in tactics)])
    heads = (*named, "M", "A µs", "B µs", "B/A", "verdict", *tactics)
    lines.insert(0, [(head, "strong") for head in heads])
    for i in range(len(named)):
        widest = max(len(line[i][0]) for line in lines)
        for line in lines:
            line[i] = (f"{line[i][0]:<{widest}}", line[i][1])
    return lines, len(named)


def _tactics(verdict: Any) -> str:
    """``before -> after`` if the tactic has changed."""
    before, after = verdict.before, verdict.after
    if not before or not after or before.tactic == after.tactic or not (before.tactic and after.tactic):
        return ""
    return f"{before.tactic} -> {after.tactic}"
