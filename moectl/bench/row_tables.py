"""Rows as tables for issues and terminals, as CSV and as JSON. Imports no torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .bench_rows import CELL, UNSTEADY, BenchRow, PreparationCosts
from .read_rows import CONSTANT

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class TableColumn:
    """One column: its title, what stands in it, and whether it is a number.

    `varies` is for columns that are shown only where rows differ in it.
    """

    title: str
    text: Callable[[BenchRow], str]
    number: bool = True
    varies: bool = False


def number(value: float | None, digits: int = 3) -> str:
    """`value` with so many significant digits and without an exponent; ``-`` for None."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def _error(row: BenchRow) -> str:
    if row.error_rms is None:
        return "-"
    return f"{row.error_rms:.1e}"


LONGEST_REASON = 160
"""Characters of a reason in a table; files have all of it."""


def _reason(row: BenchRow) -> str:
    text = " ".join(row.reason.replace("|", "/").split())
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."


def _plus_minus(row: BenchRow) -> str:
    return number(None if row.spread_us is None else row.spread_us / 2, 2)


LAYER = (
    TableColumn("model", lambda row: row.model, False, True),
    TableColumn("layers", lambda row: row.layers, False, True),
    TableColumn("scheme", lambda row: row.scheme, False, True),
    TableColumn("parallel", lambda row: row.parallel, False, True),
)
"""Which layer a row is of."""

ROUTED = (*LAYER, TableColumn("routing", lambda row: row.routing, False, True))
"""Which layer and routing a row is of."""

COLUMNS = (
    *ROUTED,
    TableColumn("backend", lambda row: row.backend, False),
    TableColumn("M", lambda row: str(row.tokens)),
    TableColumn("us", lambda row: number(row.median_us, 4)),
    TableColumn("±", _plus_minus),
    TableColumn("of floor", lambda row: "-" if row.floor_percent is None else f"{row.floor_percent:.0f}%"),
    TableColumn("floor us", lambda row: number(row.floor_us, 4)),
    TableColumn("bound", lambda row: row.bound or "-", False),
    TableColumn("GB/s", lambda row: number(row.gb_per_s, 4)),
    TableColumn("TFLOP/s", lambda row: number(row.tflop_per_s)),
    TableColumn("experts", lambda row: number(row.experts)),
    TableColumn("error", _error),
    TableColumn("tactic", lambda row: row.tactic or "-", False),
    TableColumn("throttled", lambda row: row.throttled or "-", False, True),
    TableColumn("no time because", lambda row: _reason(row) or "-", False, True),
)
"""The columns of a table. The spread is half the distance between the quartiles."""

COSTS = (
    *LAYER,
    TableColumn("backend", lambda row: row.backend, False),
    TableColumn("layout", lambda row: row.layout or "-", False),
    TableColumn("read s", lambda row: number(row.costs.read_s)),
    TableColumn("repack s", lambda row: number(row.costs.repack_s)),
    TableColumn("first s", lambda row: number(row.costs.first_s)),
    TableColumn("load s", lambda row: number(row.costs.load_s)),
    TableColumn("weights GB", lambda row: number(_giga(row.costs.weight_bytes))),
    TableColumn("held GB", lambda row: number(_giga(row.costs.held_bytes))),
    TableColumn("peak GB", lambda row: number(_giga(row.costs.peak_bytes))),
)
"""What a backend's weights cost, a line for each layer and backend (`rows.Costs`)."""


def _giga(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 1e9


def cost_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """One row for each layer and backend whose costs are known."""
    known = [row for row in rows if row.costs != PreparationCosts()]
    return list({(r.model, r.layers, r.scheme, r.parallel, r.backend): r for r in known}.values())


def served(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Rows of tables of times: those of backends that can serve the layer."""
    return [row for row in rows if not row.refused]


def shown(columns: Sequence[TableColumn], rows: Sequence[BenchRow]) -> list[TableColumn]:
    """Those of `columns` that a table of `rows` needs."""
    return [
        column
        for column in columns
        if not column.varies or len({column.text(row) for row in rows}) > 1 or _said(column, rows)
    ]


def _said(column: TableColumn, rows: Sequence[BenchRow]) -> bool:
    """True for columns of faults that some row has."""
    return column.title in ("throttled", "no time because") and any(column.text(row) != "-" for row in rows)


def constants(rows: Sequence[BenchRow]) -> str:
    """What all rows have in common, in a sentence of the columns that are not shown."""
    hidden = [column for column in COLUMNS if column not in shown(COLUMNS, rows)]
    found = {column.title: column.text(rows[0]) for column in hidden} if rows else {}
    return ", ".join(f"{title} {text}" for title, text in found.items() if text not in ("-", ""))


def footer(about: Facts, rows: Sequence[BenchRow]) -> list[str]:
    """What the numbers rest on: device, versions, floor, clocks."""
    versions = about.get("versions", {})
    if isinstance(versions, Mapping):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    driver = f", driver {about['driver']}" if about.get("driver") else ""
    lines = [f"{about.get('device', 'unknown device')}{driver}; {versions}"]
    rates = about.get("rates")
    if isinstance(rates, Mapping):
        lines.append(
            f"floor: {rates['bandwidth'] / 1e9:.4g} GB/s and {rates['flops'] / 1e12:.3g} TFLOP/s "
            f"({rates['source']})"
        )
    clocks = [row.sm_mhz for row in rows if row.sm_mhz]
    held = [row.throttled for row in rows if row.throttled]
    if clocks:
        why = f" ({', '.join(dict.fromkeys(held))})" if held else ""
        span = f"SM clock {min(clocks)} to {max(clocks)} MHz"
        lines.append(f"{span}; held down in {len(held)} of {len(clocks)} rows{why}")
    elif about.get("clocks"):
        lines.append(f"clocks {about['clocks']}")
    refused = [row for row in rows if row.refused]
    lines += dict.fromkeys(f"not served by {row.backend}: {row.model}: {_reason(row)}" for row in refused)
    rows = served(rows)
    unsteady = unsteady_rows(rows)
    if unsteady:
        worst, share = unsteady[0], f"{len(unsteady)} of {sum(row.timed for row in rows)} rows"
        told = "; ".join([f"{worst.spread:.0%}", *(column.text(worst) for column in shown(ROUTED, rows))])
        lines.append(
            f"unsteady times in {share}: quartiles more than {UNSTEADY:.0%} of the median apart, most of "
            f"{worst.backend} at M={worst.tokens} ({told}); repeat with nothing else running, or "
            "with more --repeats"
        )
    caches = dict.fromkeys(row.caches for row in rows if row.caches)
    if caches:
        lines.append(f"caches {'; '.join(caches)}")
    if rows:
        lines.append(constants(rows))
    return [line for line in lines if line]


def unsteady_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows whose times are unsteady (`BenchRow.unsteady`), the worst first."""
    return sorted((row for row in rows if row.unsteady), key=lambda row: -(row.spread or 0.0))


def markdown(about: Facts, rows: Sequence[BenchRow]) -> str:
    """Tables that paste into an issue: times, costs, and what they rest on."""
    parts = [_markdown(COLUMNS, served(rows))]
    costs = cost_rows(rows)
    if costs:
        parts.append(_markdown(COSTS, costs))
    parts.append("\n".join(f"- {line}" for line in footer(about, rows)))
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Sequence[TableColumn], rows: Sequence[BenchRow]) -> str:
    """One table, aligned so that it reads in a terminal too."""
    used = shown(columns, rows)
    lines = [[column.title for column in used], *([column.text(row) for column in used] for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(used))]

    def joined(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = [("-" * (w - 1) + ":") if c.number else "-" * w for c, w in zip(used, widths, strict=True)]
    body = [
        joined([t.rjust(w) if c.number else t.ljust(w) for t, c, w in zip(line, used, widths, strict=True)])
        for line in lines
    ]
    return "\n".join([body[0], joined(rule), *body[1:]])


def as_csv(about: Facts, rows: Sequence[BenchRow]) -> str:
    """A line for each row, with what all have in common in each."""
    constant = {name: _flat(about.get(name, "")) for name in CONSTANT}
    records = [{**constant, **row.to_json()} for row in rows]
    text = io.StringIO()
    names = list(records[0]) if records else [*CONSTANT, *BenchRow("", "", 0, "", "", 0, "").to_json()]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} {item:.6g}" if isinstance(item, float) else f"{name} {item}"
            for name, item in value.items()
        )
    return str(value)


def document(about: Facts, rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Everything as plain data, and which times are unsteady: cells with their spread, the worst first."""
    cells = [{**dict(zip(CELL, row.key, strict=True)), "spread": row.spread} for row in unsteady_rows(rows)]
    unsteady = {"threshold": UNSTEADY, "cells": cells}
    return {**about, "unsteady": unsteady, "rows": [row.to_json() for row in rows]}


def brief(row: BenchRow) -> str:
    """Backend, tokens and microseconds, or why there are none in a word, with tabs between."""
    word = number(row.median_us, 4) if row.timed else "refused" if row.refused else "failed"
    return f"{row.backend}\t{row.tokens}\t{word}"
