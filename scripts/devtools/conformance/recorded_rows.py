"""Agreement with recordings of engines whose rows have a form of their own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moectl.errors import UsageError

from .report import AgreementTally, ConformanceReport, FieldDisagreement

Row = dict[str, Any]


@dataclass(frozen=True)
class ComparedCell:
    """What was asked, its names by axis, and by field: the recorded answer and ours."""

    cell: str
    axes: Sequence[tuple[str, str]]
    answers: Mapping[str, tuple[object, object]]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a recording, .jsonl.gz."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def compare_rows(
    path: Path, is_row: Callable[[Row], bool], compared: Callable[[Row], ComparedCell]
) -> ConformanceReport:
    """Agreement with a recording by axis and by field.

    Raises UsageError for a file that cannot be read, and for a row that `is_row` does not know.
    """
    report = ConformanceReport("recorded decisions")
    try:
        rows = list(read_rows(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    for line, row in enumerate(rows, 1):
        if not is_row(row):
            raise UsageError(f"line {line} of {path} is no decision of this engine")
        found = compared(row)
        differing = {field: pair for field, pair in found.answers.items() if pair[0] != pair[1]}
        report.count(found.axes, AgreementTally(1, int(not differing)))
        for field in found.answers:
            report.count_field(field, field not in differing)
        for field, pair in differing.items():
            report.disagreements.append(FieldDisagreement(line, found.cell, field, *map(str, pair)))
    return report


def sampled(rows: Iterable[Row], traits: Callable[[Row], Iterable[tuple[object, ...]]]) -> Iterator[Row]:
    """The rows that have one of `traits` which no row before has."""
    seen: set[tuple[object, ...]] = set()
    for row in rows:
        found = set(traits(row))
        if found - seen:
            seen |= found
            yield row
