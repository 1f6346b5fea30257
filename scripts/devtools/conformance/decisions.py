"""Comparison of a policy with recorded decisions, on one core or several."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

from moectl.oracle.policy import Policy
from moectl.oracle.recorded_fields import FIELDS, ComparedField, DecisionPair, Record
from moectl.oracle.registry import engine_named, policy_named
from moectl.oracle.select import OutOfScope

from .grid import CELL, RecordedGrid, decide, has_meaning, is_direct, read_decisions, read_grid
from .report import AXES, AgreementTally, ConformanceReport, FieldDisagreement

TITLE = "recorded decisions"
EVERY_FIELD = frozenset(compared.name for compared in FIELDS)


def compare(
    records: Iterable[tuple[int, Record]],
    grid: RecordedGrid,
    policy: Policy,
    fields: Sequence[ComparedField] = FIELDS,
) -> ConformanceReport:
    """Agreement of `policy` with numbered `records` in `fields`.

    UsageError when a record uses a name that the grid does not have.
    """
    report, engine = ConformanceReport(TITLE), engine_named(policy.name)
    for line, record in records:
        names = [(axis, str(record[axis])) for axis in AXES]
        if not has_meaning(grid, record, engine):
            report.count(names, AgreementTally(without_meaning=1))
            continue
        try:
            decision = decide(grid, record, policy)
        except OutOfScope as outside:
            report.count(names, AgreementTally(outside=1))
            report.out_of_scope[outside.what] += 1
            continue
        pair = DecisionPair(record, decision, is_direct(grid, record))
        found = []
        for compared in fields:
            if not compared.stated(pair):
                continue
            recorded, ours = compared.recorded(pair), compared.ours(pair)
            report.count_field(compared.name, recorded == ours)
            if recorded != ours:
                found.append(FieldDisagreement(line, _cell(record), compared.name, recorded, ours))
        report.count(names, AgreementTally(1, int(not found)))
        report.disagreements += found
    return report


def _cell(record: Record) -> str:
    cell = " ".join(str(record[name]) for name in CELL[:-1])
    return cell + (f" asked for {record['forced']}" if record["forced"] else "")


def _part(
    path: Path, grid: Path | None, policy: str, fields: frozenset[str], part: int, parts: int
) -> ConformanceReport:
    records = read_decisions(path, part, parts)
    wanted = [compared for compared in FIELDS if compared.name in fields]
    return compare(records, read_grid(grid, engine_named(policy)), policy_named(policy), wanted)


def compare_file(
    path: Path,
    grid: Path | None = None,
    policy: str = "",
    fields: frozenset[str] = EVERY_FIELD,
    cores: int = 0,
) -> ConformanceReport:
    """Agreement of the policy with that name with the decisions in `path`.

    `cores` is how many processes share the lines; 0 means as many as the machine has, 8 at most.

    UsageError for a file, a grid or a line that cannot be read.
    """
    parts = cores or min(os.cpu_count() or 1, 8)
    report = ConformanceReport(TITLE)
    if parts == 1:
        report.add(_part(path, grid, policy, fields, 0, 1))
    else:
        with ProcessPoolExecutor(parts) as pool:
            each = (repeat(value) for value in (path, grid, policy, fields))
            for found in pool.map(_part, *each, range(parts), repeat(parts)):
                report.add(found)
    known = read_grid(grid, engine_named(policy))
    tables = (known.schemes, known.devices, known.parallel)
    for axis, table in zip(AXES, tables, strict=True):
        report.arrange(axis, table)
    return report
