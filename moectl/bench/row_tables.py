"""Rows as tables for issues and terminals, as CSV and as JSON. Imports no torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..problem.schemes import scheme_words
from .bench_rows import KEY_FIELDS, NOISY_SPREAD, BenchRow, PreparationCosts
from .read_rows import CONSTANT

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class TableColumn:
    """One column: its title, the text of a row's cell, and whether that is a number.

    A column that `varies` is shown only if rows differ in it.
    """

    title: str
    text: Callable[[BenchRow], str]
    number: bool = True
    varies: bool = False


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits and no exponent; ``-`` for None."""
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
"""Characters of a reason in a table; files hold the full text."""


def _reason(row: BenchRow) -> str:
    text = " ".join(row.reason.replace("|", "/").split())
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."


def _plus_minus(row: BenchRow) -> str:
    return number(None if row.spread_us is None else row.spread_us / 2, 2)


LAYER = (
    TableColumn("model", lambda row: row.model, False, True),
    TableColumn("layers", lambda row: row.layers, False, True),
    TableColumn("scheme", lambda row: scheme_words(row.scheme), False, True),
    TableColumn("parallel", lambda row: row.parallel, False, True),
)
"""Columns that identify a row's layer."""

ROUTED = (*LAYER, TableColumn("routing", lambda row: row.routing, False, True))
"""Columns that identify a row's layer and routing."""

COLUMNS = (
    *ROUTED,
    TableColumn("backend", lambda row: row.backend, False),
    TableColumn("M", lambda row: str(row.tokens)),
    TableColumn("µs", lambda row: number(row.median_us, 4)),
    TableColumn("±", _plus_minus),
    TableColumn("of roofline", lambda row: "-" if row.floor_percent is None else f"{row.floor_percent:.0f}%"),
    TableColumn("roofline µs", lambda row: number(row.floor_us, 4)),
    TableColumn("bound", lambda row: row.bound or "-", False),
    TableColumn("GB/s", lambda row: number(row.gb_per_s, 4)),
    TableColumn("TFLOP/s", lambda row: number(row.tflop_per_s)),
    TableColumn("active experts", lambda row: number(row.experts)),
    TableColumn("error", _error),
    TableColumn("tactic", lambda row: row.tactic or "-", False),
    TableColumn("predicted µs", lambda row: number(row.predicted_us, 4), True, True),
    TableColumn("throttled", lambda row: row.throttled or "-", False, True),
    TableColumn("no time because", lambda row: _reason(row) or "-", False, True),
)
"""Columns of the table of times. ``±`` is half the distance between the quartiles."""

COSTS = (
    *LAYER,
    TableColumn("backend", lambda row: row.backend, False),
    TableColumn("layout", lambda row: row.layout or "-", False),
    TableColumn("read s", lambda row: number(row.costs.read_s)),
    TableColumn("repack s", lambda row: number(row.costs.repack_s)),
    TableColumn("cold start s", lambda row: number(row.costs.first_s)),
    TableColumn("warm load s", lambda row: number(row.costs.load_s)),
    TableColumn("weights GB", lambda row: number(_giga(row.costs.weight_bytes))),
    TableColumn("resident GB", lambda row: number(_giga(row.costs.held_bytes))),
    TableColumn("peak GB", lambda row: number(_giga(row.costs.peak_bytes))),
)
"""Columns of the table of `PreparationCosts`, with one row per layer and backend."""


def _giga(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 1e9


def cost_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """One row for each layer and backend whose costs are known."""
    measured = [row for row in rows if row.costs != PreparationCosts()]
    return list({(r.model, r.layers, r.scheme, r.parallel, r.backend): r for r in measured}.values())


def supported(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows of backends that support their layer: those of a table of times."""
    return [row for row in rows if not row.refused]


def used_columns(columns: Sequence[TableColumn], rows: Sequence[BenchRow]) -> list[TableColumn]:
    """The `columns` that a table of `rows` needs."""
    return [
        column
        for column in columns
        if not column.varies or len({column.text(row) for row in rows}) > 1 or _has_fault(column, rows)
    ]


def _has_fault(column: TableColumn, rows: Sequence[BenchRow]) -> bool:
    """True for a column of faults that is not empty."""
    return column.title in ("throttled", "no time because") and any(column.text(row) != "-" for row in rows)


def constants(rows: Sequence[BenchRow]) -> str:
    """The values that all rows share, of the columns that are not shown, as one line."""
    hidden = [column for column in COLUMNS if column not in used_columns(COLUMNS, rows)]
    shared = {column.title: column.text(rows[0]) for column in hidden} if rows else {}
    return ", ".join(f"{title} {text}" for title, text in shared.items() if text not in ("-", ""))


def footer(about: Facts, rows: Sequence[BenchRow]) -> list[str]:
    """The conditions of the measurement, a line each: device, versions, roofline, clocks, noise, caches."""
    versions = about.get("versions", {})
    if isinstance(versions, Mapping):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    driver = f", driver {about['driver']}" if about.get("driver") else ""
    lines = [f"{about.get('device', 'unknown device')}{driver}; {versions}"]
    rates = about.get("rates")
    if isinstance(rates, Mapping):
        fp8 = rates.get("fp8_flops")
        with_fp8 = f", {fp8 / 1e12:.4g} with 8-bit tokens," if fp8 else ""
        lines.append(
            f"roofline: {rates['bandwidth'] / 1e9:.4g} GB/s and {rates['flops'] / 1e12:.3g} TFLOP/s"
            f"{with_fp8} ({rates['source']})"
        )
    clocks = [row.sm_mhz for row in rows if row.sm_mhz]
    reasons = [row.throttled for row in rows if row.throttled]
    if clocks:
        why = f" ({', '.join(dict.fromkeys(reasons))})" if reasons else ""
        span = f"SM clock {min(clocks)} to {max(clocks)} MHz"
        lines.append(f"{span}; throttled in {len(reasons)} of {len(clocks)} rows{why}")
    elif about.get("clocks"):
        lines.append(f"clocks {about['clocks']}")
    refused = [row for row in rows if row.refused]
    lines += dict.fromkeys(f"not supported by {row.backend}: {row.model}: {_reason(row)}" for row in refused)
    rows = supported(rows)
    noisy = noisy_rows(rows)
    if noisy:
        worst, share = noisy[0], f"{len(noisy)} of {sum(row.timed for row in rows)} rows"
        details = "; ".join(
            [f"{worst.spread:.0%}", *(column.text(worst) for column in used_columns(ROUTED, rows))]
        )
        lines.append(
            f"noisy times in {share}: quartiles more than {NOISY_SPREAD:.0%} of the median apart, worst: "
            f"{worst.backend} at M={worst.tokens} ({details}); repeat with nothing else running, or "
            "with more --repeats"
        )
    caches = dict.fromkeys(row.caches for row in rows if row.caches)
    if caches:
        lines.append(f"caches {'; '.join(caches)}")
    if rows:
        lines.append(constants(rows))
    return [line for line in lines if line]


def noisy_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows with noisy times (`BenchRow.noisy`), the worst first."""
    return sorted((row for row in rows if row.noisy), key=lambda row: -(row.spread or 0.0))


def markdown(about: Facts, rows: Sequence[BenchRow]) -> str:
    """Markdown for an issue: tables of times and costs, and the conditions of the measurement."""
    parts = [_markdown(COLUMNS, supported(rows))]
    costs = cost_rows(rows)
    if costs:
        parts.append(_markdown(COSTS, costs))
    parts.append("\n".join(f"- {line}" for line in footer(about, rows)))
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Sequence[TableColumn], rows: Sequence[BenchRow]) -> str:
    """One table, aligned so that it is also readable as plain text."""
    used = used_columns(columns, rows)
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
    """One line per row; the machine's columns (`CONSTANT`) are repeated in each."""
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
    """All of it as plain data; ``unsteady`` lists the cases with noisy times, the worst first."""
    cells = [
        {**dict(zip(KEY_FIELDS, row.key, strict=True)), "spread": row.spread} for row in noisy_rows(rows)
    ]
    noisy = {"threshold": NOISY_SPREAD, "cells": cells}
    own = {name: value for name, value in about.items() if name not in HEADER}
    return {**own, "unsteady": noisy, "rows": [row.to_json() for row in rows]}


HEADER = ("schema_version", "moectl", "command", "kind")
"""What a file of rows says of itself; ``versions`` has the moectl that measured them."""


def result_word(row: BenchRow) -> str:
    """Microseconds, or why there are none: ``refused``, ``wrong``, ``failed``."""
    if row.timed:
        return number(row.median_us, 4)
    return "refused" if row.refused else "wrong" if row.ok is False else "failed"


def brief(row: BenchRow) -> str:
    """Model, layers, scheme, parallel, routing, backend, tokens and `result_word`, separated by tabs."""
    named = (row.model, row.layers, row.scheme, row.parallel, row.routing, row.backend, str(row.tokens))
    return "\t".join([*named, result_word(row)])


def why_untimed(backend: str, reason: str) -> str:
    """`reason` in one line, without the words that it begins with for every backend."""
    text = " ".join(reason.split()).removeprefix("wrong result: ").removeprefix(f"backend {backend} ")
    for beginning in ("does not support", "cannot serve"):
        text = text.removeprefix(f"{beginning} this deployment: ")
    return text


def one_line(row: BenchRow, width: int | None = None) -> str:
    """A row for people, as it is printed when it has been measured.

    Details that do not fit into `width` columns are left out; tables and files have them.
    """
    where = " ".join(text for text in (row.model, row.layers, row.routing) if text != "-")
    if row.parallel != "1":
        where += f" {row.parallel}"
    head = f"{where} M={row.tokens:<4} {row.backend:<18} {result_word(row):>6}"
    if not row.timed:
        line = f"{head}  {why_untimed(row.backend, row.reason)}".rstrip()
        return line if width is None or len(line) <= width else f"{line[: width - 3]}..."
    if width is not None and len(head) + 3 > width:
        head = " ".join(head.split())
    line = f"{head} µs"
    share = "" if row.floor_percent is None else f" {row.floor_percent:3.0f}% roofline"
    for detail in (f" ±{_plus_minus(row):<4}", share):
        if width is None or len(line) + len(detail) <= width:
            line += detail
    return line.rstrip()


def machine_line(about: Facts, rows: Sequence[BenchRow]) -> str:
    """The machine and versions in one line."""
    versions = about.get("versions")
    named = versions if isinstance(versions, Mapping) else {}
    parts = [str(about.get("device", "unknown device"))]
    parts += [f"{name} {named[name]}" for name in ("torch", "triton", "moectl") if named.get(name)]
    caches = [row.caches.partition(":")[0] for row in rows if row.caches]
    parts += [f"{state} L2" if state in ("cold", "warm") else state for state in dict.fromkeys(caches)]
    return ", ".join(parts)
