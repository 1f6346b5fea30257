"""Rows and documents, made to take the time of what reads them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moectl.files.strict_json import VALUES_LIMIT, count_values

LARGEST = 64 << 20
"""Bytes of the largest file."""

ROWS, CSV, DOCUMENT = "rows.jsonl", "rows.csv", "document.json"


def lines(unit: Callable[[int], bytes], folder: Path, share: float) -> None:
    """Lines after the header of a bench."""
    from moectl import SCHEMA_VERSION

    head = {"kind": "run", "schema_version": SCHEMA_VERSION, "settings": {}}
    _table(folder / ROWS, json.dumps(head).encode(), unit, share)


def _table(path: Path, first: bytes, unit: Callable[[int], bytes], share: float) -> None:
    """A file of lines, as long as its share of a file's bytes and of the values that a reader counts."""
    length, left = len(first) + 1, int(VALUES_LIMIT * share * 0.99)
    number = 0
    with path.open("wb") as file:
        file.write(first + b"\n")
        while length < LARGEST * share * 0.99 and left > 0:
            line = unit(number) + b"\n"
            file.write(line)
            length, left, number = length + len(line), left - count_values(line), number + 1


def _row(number: int) -> dict[str, Any]:
    """A valid row, the only one of its case."""
    names = {"model": f"m{number}", "backend": f"b{number}", "routing": f"r{number}"}
    times = {"median_us": 1 + number % 7, "q1_us": 1, "q3_us": 7.5, "rounds": 11}
    return {
        **names,
        "layers": "0-1",
        "layer": 0,
        "scheme": "mxfp4",
        "tokens": number + 1,
        "ok": True,
        **times,
    }


def row_line(number: int) -> bytes:
    """A valid row of a case of its own."""
    return json.dumps({"kind": "row", **_row(number)}).encode()


def settings_line(number: int) -> bytes:
    """A header that adds a model to the settings."""
    return b'{"kind":"run","settings":{"models":["%d"]}}' % number


def csv_rows(folder: Path, share: float) -> None:
    """A CSV file of valid rows."""

    def line(number: int) -> bytes:
        return ",".join(map(str, _row(number).values())).encode()

    _table(folder / CSV, ",".join(_row(0)).encode(), line, share)


def csv_columns(folder: Path, share: float) -> None:
    """A table of many columns, which its lines do not have."""
    columns = b",".join(b"c%d" % number for number in range(int(1_000_000 * share)))
    _table(folder / CSV, columns, lambda _: b"1", share)


def csv_lines(folder: Path, share: float) -> None:
    """A CSV file of one column."""
    _table(folder / CSV, b"model", lambda _: b"1", share)


def decisions(key: str, folder: Path, share: float) -> None:
    """A valid document with one decision many times, in its ``groups`` or its ``rows``."""
    import moectl

    document = moectl.explain("gpt-oss-20b", gpu="h100").to_json()
    if key == "rows":
        del document["groups"]
    unit = json.dumps(document.pop(key)[0]).encode()
    count = int(min(LARGEST / (len(unit) + 1), VALUES_LIMIT / count_values(unit + b",")) * share * 0.99)
    rest = json.dumps(document)[:-1].encode() + b', "%s": [' % key.encode()
    (folder / DOCUMENT).write_bytes(rest + b",".join([unit] * max(1, count)) + b"]}")
