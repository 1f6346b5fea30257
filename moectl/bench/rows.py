"""Rows of a bench and what they were taken on, and the files they are kept in."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, get_type_hints

from .. import SCHEMA_VERSION, __version__
from ..errors import Unavailable, UsageError
from ..unreadable import unreadable
from .settings import Settings, differences

Key = tuple[str, str, str, str, int, str, str]
"""Model, layers, scheme, backend, tokens, routing and parallel: what makes two rows the same cell."""

TIMES = ("median_us", "q1_us", "q3_us", "fastest_us")
"""Fields of a row that are times of a call."""

LARGEST_FILE = 1 << 30
"""Most bytes of a file of rows that is read."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a backend's weights cost before the first call; None where it cannot be told.

    Attributes:
        read_s: reading the stored layer, or drawing a random one, in seconds.
        repack_s: laying it out for the backend, without reading it: what an engine pays at every start.
        first_s: all of it the first time in this process, what had to be compiled or loaded included.
        load_s: bringing the same weights to the device when they lie ready in host memory.
        weight_bytes: of the weights as the backend is given them.
        held_bytes: device memory that the layer holds once it is ready, what a library made of them included.
        peak_bytes: device memory at its highest while they were laid out, the weights included.
    """

    read_s: float | None = None
    repack_s: float | None = None
    first_s: float | None = None
    load_s: float | None = None
    weight_bytes: int | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One backend on one layer at one number of tokens and one routing.

    Attributes:
        model, layers, layer: whose, the layers that are alike, and which of them it is.
        tactic: what the backend says that it launches; empty where it does not tell.
        parallel: ``1``, or how the layer is shared, as ``tp2 ep4``: the row is of the first rank.
        caches: how cold the weights were, in words.
        experts: hit by a call, the mean of the routings.
        ok: whether the result was right; None when there was none.
        error_rms, error_max: against the fp32 reference, relative (`kernels.tolerance`).
        checked_tokens: tokens that were compared, of all calls; all others are checked to be finite.
        reason: why there is no time; empty where there is one.
        refused: the backend cannot serve the layer, and said so before anything ran: no failure.
        median_us, q1_us, q3_us, fastest_us: of a call, over `rounds` measurements of `calls` calls each,
            between which the other backends of the cell took their turns.
        method: how a measurement was made.
        bytes, flops: what a call must do at least (`floors.Work`).
        gb_per_s, tflop_per_s: what the median makes of them.
        floor_us, bound: the least time on this device, and what sets it.
        floor_percent: the floor's share of the median, in percent.
        sm_mhz, memory_mhz: lowest clocks while the cell was timed; None where nobody tells.
        throttled: why the driver held clocks down meanwhile; empty where it did not, or nobody tells.
    """

    model: str
    layers: str
    layer: int
    scheme: str
    backend: str
    tokens: int
    routing: str
    parallel: str = "1"
    layout: str = ""
    tactic: str = ""
    caches: str = ""
    experts: float | None = None
    ok: bool | None = None
    error_rms: float | None = None
    error_max: float | None = None
    checked_tokens: int = 0
    reason: str = ""
    refused: bool = False
    median_us: float | None = None
    q1_us: float | None = None
    q3_us: float | None = None
    fastest_us: float | None = None
    rounds: int = 0
    calls: int = 0
    method: str = ""
    bytes: int | None = None
    flops: int | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    floor_us: float | None = None
    bound: str = ""
    floor_percent: float | None = None
    costs: Costs = field(default_factory=Costs)
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    throttled: str = ""

    @property
    def key(self) -> Key:
        """What tells its cell from others."""
        return (
            self.model,
            self.layers,
            self.scheme,
            self.backend,
            self.tokens,
            self.routing,
            self.parallel,
        )

    @property
    def timed(self) -> bool:
        """True when there is a time, which there is of right results alone."""
        return self.median_us is not None

    @property
    def failed(self) -> bool:
        """True when there is no time, and there should be one."""
        return not self.timed and not self.refused

    @property
    def spread_us(self) -> float | None:
        """Distance between the first and the third quartile."""
        return None if self.q1_us is None or self.q3_us is None else self.q3_us - self.q1_us

    def to_json(self) -> dict[str, Any]:
        """As flat data, costs among the rest; numbers that are not finite are None."""
        flat = {**asdict(self), **asdict(self.costs)}
        del flat["costs"]
        return {name: _finite(value) for name, value in flat.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> Row:
        """The row that flat `data` describes; UsageError when it describes none."""
        row = cls(**_typed(cls, data, where), costs=Costs(**_typed(Costs, data, where)))
        for name in TIMES:
            value = getattr(row, name)
            if value is not None and value <= 0:
                raise UsageError(f"{where}: {name} must be above 0, got {value:g}")
        if row.timed and not row.ok:
            raise UsageError(f"{where} has a time, which only right results have, and ok is {row.ok}")
        if row.q1_us is not None and row.q3_us is not None and row.q1_us > row.q3_us:
            raise UsageError(f"{where}: q1_us {row.q1_us:g} is above q3_us {row.q3_us:g}")
        return row


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _typed(kind: type, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the record `kind` that `data` has, in their types; texts of a CSV file are read."""
    hints, found = get_type_hints(kind), {}
    for it in fields(kind):
        if it.name == "costs" or it.name not in data:
            continue
        wanted = [t for t in (str, bool, int, float) if t in _kinds(hints[it.name])]
        try:
            found[it.name] = _read(data[it.name], wanted, type(None) in _kinds(hints[it.name]))
        except ValueError as error:
            raise UsageError(f"{where}: {it.name} must not be {data[it.name]!r}") from error
    needed = {"model", "layers", "layer", "scheme", "backend", "tokens", "routing"}
    if kind is Row and not needed <= found.keys():
        raise UsageError(f"{where} is no row of a bench: it lacks {', '.join(sorted(needed - found.keys()))}")
    return found


def _kinds(hint: Any) -> tuple[type, ...]:
    return getattr(hint, "__args__", (hint,))


_WORDS = {"True": True, "true": True, "False": False, "false": False}


def _read(value: Any, wanted: Sequence[type], optional: bool) -> Any:
    if value is None or (value == "" and str not in wanted):
        if optional:
            return None
        raise ValueError(value)
    kind = wanted[0]
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(value)
        return value
    if kind is bool:
        found = _WORDS.get(str(value))
        if found is None:
            raise ValueError(value)
        return found
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(value)
    number = float(value)
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise ValueError(value)
    return kind(value) if not isinstance(value, str) or kind is float else int(number)


@dataclass(frozen=True)
class Run:
    """What rows were taken on.

    Attributes:
        settings: as plain data, of `Settings.to_json`.
        machine: ``device``, ``driver``, ``versions``, ``rates``, ``caches``, and what else is worth knowing.
    """

    settings: Mapping[str, Any]
    machine: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        about = {"schema_version": SCHEMA_VERSION, "moectl": __version__, "command": "bench"}
        return {**about, "settings": dict(self.settings), **self.machine}


@dataclass(frozen=True)
class Rows:
    """A file of rows, read: what they were taken on, as plain data, and the rows, the last of each cell.

    `notes` say what of the file does not count.
    """

    about: Mapping[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


class Journal:
    """A JSONL file of rows that are written as they come: the first line says what they were taken on.

    Each line is on its way to the disk before the next row is measured, so that a run that is killed
    keeps its rows.
    """

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self._file = path, file

    @classmethod
    def begin(cls, path: Path, run: Run) -> Journal:
        """A new file. Raises UsageError when there are rows in it already, Unavailable when it cannot be."""
        if path.exists() and path.stat().st_size:
            raise UsageError(
                f"{path} has something in it already",
                hint="go on with it by --resume, or remove it, or give another name",
            )
        made = cls(path, _opened(path, "w"))
        made._write({"kind": "run", **run.to_json()})
        return made

    @classmethod
    def resume(cls, path: Path) -> Journal:
        """The file of an earlier run, opened for more rows; a line that was not finished is cut off."""
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
        return cls(path, _opened(path, "a"))

    def add(self, row: Row) -> None:
        """Writes one row."""
        self._write({"kind": "row", **row.to_json()})

    def _write(self, data: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(data, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise Unavailable(f"cannot write {self.path}: {error.strerror or error}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _opened(path: Path, mode: str) -> IO[str]:
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror or error}") from error


def earlier(path: Path, settings: Settings, machine: Mapping[str, Any]) -> Rows:
    """The rows of an earlier run that `settings` on `machine` goes on with.

    Raises UsageError when it was another run: other settings, another device, or other versions.
    """
    found = read_rows(path)
    same = ("device", "versions")
    others = differences(settings.to_json(), found.about.get("settings", {}))
    others += differences({k: machine.get(k) for k in same}, {k: found.about.get(k) for k in same})
    if others:
        raise UsageError(
            f"{path} is of another run: {'; '.join(others)}",
            hint="ask for what it was begun with, or begin a new file",
        )
    return found


def read_rows(path: Path) -> Rows:
    """The rows of a .jsonl, .json or .csv file that a bench has written.

    Of rows of the same cell the last one counts; a last line that was not finished does not, which is noted.
    Raises UsageError when the file cannot be read or is none.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UsageError(f"{path} has more than {LARGEST_FILE} bytes: that is no file of rows")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), path, error, "a file of rows in UTF-8") from error
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"the suffix of {path} names no file of rows, expected one of {', '.join(_READERS)}",
            hint="give what `moectl bench -o` wrote",
        )
    about, rows = reader(text, str(path))
    version = about.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{path} has rows of schema version {version!r}, and this moectl reads version {SCHEMA_VERSION}",
            hint="read it with the moectl that wrote it",
        )
    cut = path.suffix.lower() == ".jsonl" and not text.endswith("\n")
    notes = (f"the last line of {path} was not finished and does not count",) if cut else ()
    return Rows(about, tuple({row.key: row for row in rows}.values()), notes)


_Read = tuple[Mapping[str, Any], Iterable[Row]]


def _from_jsonl(text: str, where: str) -> _Read:
    whole, _, _ = text.rpartition("\n")
    about: Mapping[str, Any] = {}
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        place = f"{where}, line {number}"
        data = _object(line, place)
        if data.get("kind") == "run" and number == 1:
            about = data
        elif data.get("kind") == "row":
            rows.append(Row.from_json(data, place))
        else:
            raise UsageError(f"{place} is no line of a bench", hint="give what `moectl bench -o` wrote")
    if not about:
        raise UsageError(f"{where} does not begin as a bench's file does")
    return about, rows


def _from_json(text: str, where: str) -> _Read:
    data = _object(text, where)
    rows = data.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{where} has no rows of a bench")
    return data, [Row.from_json(row, f"{where}, row {i}") for i, row in enumerate(rows, 1)]


def _from_csv(text: str, where: str) -> _Read:
    lines = list(csv.DictReader(io.StringIO(text)))
    about: dict[str, Any] = {name: lines[0].get(name) for name in CONSTANT if lines and name in lines[0]}
    if about.get("versions"):
        pairs = (item.strip().partition(" ") for item in about["versions"].split(","))
        about["versions"] = {name: version for name, _, version in pairs}
    return about, [Row.from_json(line, f"{where}, line {i}") for i, line in enumerate(lines, 2)]


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{where} is not a JSON object")
    return data


_READERS = {".jsonl": _from_jsonl, ".json": _from_json, ".csv": _from_csv}

CONSTANT = ("device", "driver", "versions", "rates")
"""What a CSV file says of the machine, the same in every line."""
