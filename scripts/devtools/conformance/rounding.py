"""Comparison of a policy with an engine's recorded answers on rounded sizes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moectl.environment import Packages
from moectl.errors import UsageError
from moectl.oracle.backend import Backend, SupportQuery
from moectl.oracle.engine import Engine
from moectl.oracle.policy import Policy
from moectl.oracle.recorded_fields import Record
from moectl.oracle.registry import engine_named
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import Scheme, WeightFormat

from .grid import RecordedGrid, opened, recorded_device
from .report import AgreementTally, ConformanceReport, FieldDisagreement

TITLE = "recorded roundings"
NEEDED = ("device", "family", "backend", "activation", "hidden", "intermediate", "padded")


def read_rounding(path: Path, engine: Engine | None = None) -> list[Record]:
    """Answers that `engine` (the default one for None) gave, of a ``.json`` or ``.json.gz`` file.

    UsageError when it holds none.
    """
    families = _families(engine or engine_named())
    try:
        with opened(path) as text:
            rows: Any = json.load(text)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} must be a list of objects, one for each answer")
    for number, row in enumerate(rows, 1):
        if missing := [name for name in NEEDED if name not in row]:
            raise UsageError(f"{path} answer {number} has no {', '.join(missing)}")
        if row["family"] not in families:
            known = ", ".join(families)
            raise UsageError(f"{path} answer {number} is of the family {row['family']!r}, known are {known}")
    return rows


def compare_rounding(rows: Iterable[Record], grid: RecordedGrid, policy: Policy) -> ConformanceReport:
    """Agreement of `policy` with recorded roundings; UsageError when the grid lacks a device."""
    report, families = ConformanceReport(TITLE), _families(engine_named(policy.name))
    backends = {family: _backends(policy, weight) for family, weight in families.items()}
    for line, row in enumerate(rows, 1):
        family = row["family"]
        names = [("family", family), ("device", row["device"]), ("backend", f"{family} {row['backend']}")]
        weight = families.get(family)
        if weight is None or not backends[family]:
            report.count(names, AgreementTally(outside=1))
            report.out_of_scope[f"{policy.name} has no row for {weight or family}"] += 1
            continue
        backend = backends[family].get(row["backend"], Backend("", "", (), forms=policy.forms(weight)))
        problem = MoEProblem(Dims(row["hidden"], row["intermediate"]), 8, 2, Scheme(weight))
        ask = SupportQuery(
            problem,
            recorded_device(grid.row("devices", row["device"])),
            Packages(),
            str(weight),
            activation=row["activation"] or "",
        )
        dims = backend.align(ask).apply(problem.dims)
        ours, recorded = [dims.padded_hidden, dims.padded_intermediate], row["padded"]
        report.count(names, AgreementTally(1, int(ours == recorded)))
        report.count_field("padded", ours == recorded)
        if ours != recorded:
            cell = " ".join(str(row[name]) for name in NEEDED[:-1])
            report.disagreements.append(FieldDisagreement(line, cell, "padded", recorded, ours))
    return report


def _families(engine: Engine) -> Mapping[str, WeightFormat]:
    """Weight formats whose sizes the engine rounds, by the name in its recorded answers."""
    return engine.recordings.rounded if engine.recordings else {}


def _backends(policy: Policy, weight: WeightFormat) -> dict[str, Backend]:
    """Backends of the policy's rows for `weight`, by the engine's name."""
    return {
        backend.engine_name: backend
        for route in policy.routes
        if route.weights == {weight.name}
        for backend in route.backends()
    }
