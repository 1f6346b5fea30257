"""Reads the files of rows that a bench writes. Imports no torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import READABLE_SCHEMAS, SCHEMA_VERSION
from ..cache.backend_times import current_name
from ..errors import UsageError
from ..files.records import Above0, Count, From0, Size, extensible, from_json
from ..files.safe_reading import read_given, unreadable
from ..files.strict_json import VALUES_LIMIT, count_values, parse_document
from .bench_rows import BenchRow
from .settings import merge_settings


@extensible
@dataclass(frozen=True)
class RecordedSettings:
    """Settings of a run as a file has them: those of its version, see `BenchSettings`."""

    checkpoint: str = ""
    models: tuple[str, ...] = ()
    tokens: tuple[Count, ...] = ()
    routings: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    layer: Size | None = None
    tp: Count = 1
    ep: Count = 1
    dispatched: bool = False
    input: str = ""
    device: str = ""
    rounds: Count = 1
    warm: bool = False
    seed: Size = 0
    files: Mapping[str, str] = field(default_factory=dict)


@extensible
@dataclass(frozen=True)
class RecordedRates:
    """Rates of a device as a file has them, see `MeasuredRates`."""

    bandwidth: Above0
    flops: Above0
    source: str
    fp8_flops: From0 = 0.0


@extensible
@dataclass(frozen=True)
class RecordedConditions:
    """The conditions of a run, as plain data the first line of a file, see `RunHeader`."""

    schema_version: Count = SCHEMA_VERSION
    moectl: str = ""
    command: str = "bench"
    settings: RecordedSettings = field(default_factory=RecordedSettings)
    device: str = ""
    driver: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    rates: RecordedRates | None = None
    cache_bytes: Size | None = None
    caches: str = ""
    clocks: str = ""
    begun: str = ""
    engine_picks: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class BenchRows:
    """The contents of a file of rows: the run's conditions as plain data, and the last row of each case.

    `notes` are sentences about what was ignored.
    """

    about: Mapping[str, Any]
    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings as plain data; empty if the file does not have them."""
        return _settings(self.about)


def read_rows(path: Path) -> BenchRows:
    """The rows of a .jsonl, .json or .csv file that a bench has written.

    Of several rows of a case the last one counts; an incomplete last line is ignored with a note.
    Raises UsageError if the file cannot be read or is not a file of rows.
    """
    kind = "a file that `moectl bench -o` wrote"
    data = read_given(path, kind)
    if count_values(data) > VALUES_LIMIT:
        raise UsageError(f"{path} has more than {VALUES_LIMIT} values: that is not a file of rows")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise unreadable(str(path), path, error, kind) from error
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"the suffix of {path} is not that of a file of rows, expected one of {', '.join(_READERS)}",
            hint="give what `moectl bench -o` wrote",
        )
    about, rows = reader(text, str(path))
    version = about.get("schema_version", SCHEMA_VERSION)
    if version not in READABLE_SCHEMAS:
        raise UsageError(
            f"{path} has rows of schema version {version!r}, and this moectl reads "
            f"{' or '.join(map(str, READABLE_SCHEMAS))}",
            hint="read it with the moectl that wrote it",
        )
    truncated = path.suffix.lower() == ".jsonl" and not text.endswith("\n")
    notes = (f"the last line of {path} is incomplete and was ignored",) if truncated else ()
    return BenchRows(_with_current_names(about), tuple({row.key: row for row in rows}.values()), notes)


def _with_current_names(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """`about` with the backends of its settings as they are called now."""
    backends = _settings(about).get("backends")
    if not isinstance(backends, list):
        return about
    names = [current_name(name) if isinstance(name, str) else name for name in backends]
    return {**about, "settings": {**_settings(about), "backends": names}}


ROWS_LIMIT = 10_000
"""Most rows of a file, and lines that are rows or headers of runs; a large bench has some thousands."""

COLUMNS_LIMIT = 1000
"""Most columns of a CSV file, each of which is looked at for every row."""


def _refuse_many(found: int, limit: int, what: str, where: str) -> None:
    """UsageError when a file has more than `limit` of something."""
    if found > limit:
        raise UsageError(
            f"{where} has {found} {what}, expected at most {limit} in a file of rows",
            hint="give what `moectl bench -o` wrote, or split it",
        )


ROW_KEYS = ("rows", "unsteady")
"""Keys of a JSON document about its rows; the others are the conditions of the run."""

_Read = tuple[Mapping[str, Any], Iterable[BenchRow]]


def _from_jsonl(text: str, where: str) -> _Read:
    complete, _, _ = text.rpartition("\n")
    _refuse_many(text.count("\n"), ROWS_LIMIT, "lines", where)
    runs: list[Mapping[str, Any]] = []
    rows = []
    for number, line in enumerate(complete.split("\n") if complete else (), 1):
        line_name = f"{where}, line {number}"
        data = parse_document(line, line_name, _not_rows)
        if data.get("kind") == "run" and (number == 1 or runs):
            runs.append(_conditions(data, line_name))
        elif data.get("kind") == "row":
            rows.append(BenchRow.from_json(data, line_name))
        else:
            raise UsageError(
                f"{line_name} is not a line of a bench", hint="give what `moectl bench -o` wrote"
            )
    if not runs:
        raise UsageError(f"{where} does not begin with the header of a bench")
    if len(runs) == 1:
        return runs[0], rows
    return {**runs[0], "settings": merge_settings(*map(_settings, runs))}, rows


def _not_rows(sentence: str) -> UsageError:
    return UsageError(sentence, hint="give what `moectl bench -o` wrote")


def _conditions(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """`data`, whose fields have the types of `RecordedConditions`; UsageError if they have not."""
    from_json(RecordedConditions, data, f"{where}: ", _not_rows)
    return data


def _settings(about: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = about.get("settings")
    return settings if isinstance(settings, Mapping) else {}


def _from_json(text: str, where: str) -> _Read:
    data = parse_document(text, where, _not_rows)
    rows = data.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{where} has no rows of a bench")
    _refuse_many(len(rows), ROWS_LIMIT, "rows", where)
    about = {name: value for name, value in data.items() if name not in ROW_KEYS}
    return _conditions(about, where), [
        BenchRow.from_json(row, f"{where}, row {i}") for i, row in enumerate(rows, 1)
    ]


def _from_csv(text: str, where: str) -> _Read:
    _refuse_many(text.count("\n"), ROWS_LIMIT + 1, "lines", where)
    _refuse_many(text.partition("\n")[0].count(",") + 1, COLUMNS_LIMIT, "columns", where)
    try:
        lines = list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise _not_rows(f"{where} is not a CSV file: {error}") from error
    about: dict[str, Any] = {name: lines[0].get(name) for name in CONSTANT if lines and name in lines[0]}
    if about.get("versions"):
        pairs = (item.strip().partition(" ") for item in about["versions"].split(","))
        about["versions"] = {name: version for name, _, version in pairs}
    rows = [BenchRow.from_json(line, f"{where}, line {i}", text=True) for i, line in enumerate(lines, 2)]
    return about, rows


_READERS = {".jsonl": _from_jsonl, ".json": _from_json, ".csv": _from_csv}

CONSTANT = ("device", "driver", "versions", "rates")
"""Columns of a CSV file about the machine, equal in every line."""
