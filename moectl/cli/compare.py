"""`moectl compare`: two runs of `moectl bench`, compared case by case."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.compare_runs import REGRESSIONS, VERDICTS
from ..errors import ExitCode
from .options import framed, option
from .output import Output, count, table

if TYPE_CHECKING:
    from ..bench.compare_runs import RunComparison

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
    *,
    out: Output,
) -> ExitCode:
    """Compare two runs of a bench.

    Case by case, with verdicts that take noise into account. Exit code 1 if a case became slower or lost its
    time, or the runs have no case in common.
    """
    from ..bench import compare_runs as library
    from ..bench.read_rows import read_rows

    comparison = library.compare(read_rows(before), read_rows(after), threshold)
    document = {"before": str(before), "after": str(after), **library.document(comparison, threshold)}
    summary = ", ".join(f"{number} {word}" for word, number in comparison.counts.items()) or "no rows"
    out.result(document, lambda console: _draw(comparison, summary, console), summary)
    return ExitCode.FOUND if comparison.regressed else ExitCode.DONE


def _draw(comparison: "RunComparison", summary: str, console: Any) -> None:
    from ..bench.row_tables import COLUMNS, number

    titles = ("model", "layers", "scheme", "parallel", "routing", "backend", "M")
    columns = [column for column in COLUMNS if column.title in titles]
    rows = [verdict.row for verdict in comparison.verdicts]
    columns = [c for c in columns if not c.varies or len({c.text(row) for row in rows}) > 1]
    numbers = ("A us", "B us", "B / A")
    cases = table(*(c.title for c in columns), *numbers, "verdict", "why", right=("M", *numbers))
    for verdict in comparison.verdicts:
        times = [number(row.median_us if row else None, 4) for row in (verdict.before, verdict.after)]
        ratio = "-" if verdict.ratio is None else f"{verdict.ratio:.3f}"
        identity = [column.text(verdict.row) for column in columns]
        cases.add_row(*identity, *times, ratio, verdict.word, verdict.row.reason or _tactics(verdict))
    console.print(cases)
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"{count(len(comparison.verdicts), 'case')}: {summary}", markup=False)


def _tactics(verdict: Any) -> str:
    """``before -> after`` if the tactic has changed."""
    before, after = verdict.before, verdict.after
    if not before or not after or before.tactic == after.tactic or not (before.tactic and after.tactic):
        return ""
    return f"{before.tactic} -> {after.tactic}"
