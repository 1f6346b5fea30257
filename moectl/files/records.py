"""Conversion of records (dataclasses, named tuples) from and to JSON and table rows, by their field types.

msgspec 0.22 was tried and does not replace it: it ignores unknown fields of a dataclass, stops at the first
error, and does not report the offending value.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import CheckpointError
from ..whole_numbers import whole_number
from .strict_json import Refusal, json_words

Record = TypeVar("Record")


@dataclass(frozen=True)
class Least:
    """The least value of a number, which itself is allowed unless `above`; a mark of a field's type."""

    value: int
    above: bool = False

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.value}"

    def allows(self, number: float) -> bool:
        """True for a number in the range."""
        return number > self.value if self.above else number >= self.value

    @property
    def schema(self) -> dict[str, float]:
        """What JSON Schema calls it."""
        return {"exclusiveMinimum" if self.above else "minimum": self.value}


@dataclass(frozen=True)
class Between:
    """The least and the greatest value of a number, both allowed; a mark of a field's type."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"from {self.least:g} to {self.most:g}"

    def allows(self, number: float) -> bool:
        """True for a number in the range."""
        return self.least <= number <= self.most

    @property
    def schema(self) -> dict[str, float]:
        """What JSON Schema calls it."""
        return {"minimum": self.least, "maximum": self.most}


Size = Annotated[int, Least(0)]
"""A number of bytes or things, perhaps none."""

Count = Annotated[int, Least(1)]
"""A number of things, one or more."""

Above0 = Annotated[float, Least(0, above=True)]
From0 = Annotated[float, Least(0)]

MOST_NAMED = 8
"""Fields that a message names."""


def extensible(record: type[Record]) -> type[Record]:
    """Marks a record of part of a published document, to which later versions may add: `from_json` ignores
    fields that it does not have."""
    record._extensible = True  # type: ignore[attr-defined]
    return record


def to_json(value: Any) -> Any:
    """`value` as JSON data: records become objects of their fields, tuples lists, sets sorted lists.

    Example:
        >>> from moectl.problem.moe_problem import Dims
        >>> to_json(Dims(2880, 2880))
        {'hidden': 2880, 'intermediate': 2880, 'padded_hidden': 2880, 'padded_intermediate': 2880}
    """
    kind: Any = type(value)
    if is_record(kind):
        return {name: to_json(getattr(value, name)) for name in field_kinds(kind)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(item) for item in value)
    return value


def from_json(record: type[Record], data: Any, where: str, refusal: Refusal = CheckpointError) -> Record:
    """The `record` described by `data`, if every field has the right type.

    Field types may be str, int, float, bool, Any, records, unions of these, tuples, frozen sets and mappings
    of these with keys that are strings or whole numbers; a number's type may be marked with its `Least`
    value, or with the two that it is `Between`. A bool is not accepted as an int; an int is accepted as a
    float, and not converted. Fields with a default may be absent, so that records can be extended. `where` is
    the path of `data` in error messages; the name of a file ends with a colon and a blank.

    Raises:
        CheckpointError, or the error made by `refusal`: a field is missing, unknown or of the wrong type,
            or the record's constructor rejects the values.

    Example:
        >>> from moectl.problem.moe_problem import Dims
        >>> from_json(Dims, {"hidden": 2880, "intermediate": "2880"}, "dims")
        Traceback (most recent call last):
        moectl.errors.CheckpointError: dims.intermediate must be a whole number, got the string '2880'
    """
    try:
        built: Record = _record(record, data, where)
    except _Mismatch as mismatch:
        raise refusal(mismatch.sentence) from mismatch.__cause__
    return built


_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
"""Types of fields in JSON's words."""


class _Mismatch(Exception):
    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


def _mismatch(where: str, expected: str, got: Any) -> _Mismatch:
    return _Mismatch(f"{_named(where)} must be {expected}, got {json_words(got)}.")


def _named(where: str) -> str:
    return where.removesuffix(": ")


def _inside(where: str, name: str) -> str:
    """The path of the field `name` of what is at `where`."""
    name = name if len(name) <= 80 else f"{name[:40]}...{name[-40:]}"
    return f"{where}{name}" if where.endswith(": ") else f"{where}.{name}"


@cache
def is_record(kind: Any) -> bool:
    return is_dataclass(kind) or (
        isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    )


@cache
def field_kinds(record: Any) -> Mapping[str, Any]:
    """The types of a record's fields, by name, with their marks."""
    hints = get_type_hints(record, include_extras=True)
    names = [field.name for field in fields(record)] if is_dataclass(record) else record._fields
    return {name: hints[name] for name in names}


@cache
def _required(record: Any) -> frozenset[str]:
    """The fields of a record without a default."""
    if not is_dataclass(record):
        return frozenset(name for name in record._fields if name not in record._field_defaults)
    return frozenset(
        field.name
        for field in fields(record)
        if field.default is MISSING and field.default_factory is MISSING
    )


def _record(record: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _mismatch(where, "an object", data)
    kinds, required = field_kinds(record), _required(record)
    missing, unknown = sorted(required - set(data)), sorted(set(data) - set(kinds))
    if getattr(record, "_extensible", False):
        unknown = []
    if missing or unknown:
        parts = [f"is incomplete: it lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown fields {_listed(unknown)}"] if unknown else []
        raise _Mismatch(f"{_named(where)} {' and '.join(parts)}.")
    values = {
        name: _value(kinds[name], item, _inside(where, name)) for name, item in data.items() if name in kinds
    }
    try:
        return record(**values)
    except (TypeError, ValueError) as error:
        raise _Mismatch(f"{_named(where)} is not valid: {error}.") from error


def _listed(names: list[str]) -> str:
    shown = [name if len(name) <= 80 else f"{name[:80]}..." for name in names[:MOST_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _value(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if is_record(kind):
        return _record(kind, data, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin is None:
        return _scalar(kind, data, where)
    if origin is Annotated:
        number = _value(args[0], data, where)
        for mark in args[1:]:
            if not mark.allows(number):
                raise _Mismatch(f"{_named(where)} must be {mark}, got {number}.")
        return number
    if origin in (Union, types.UnionType):
        return _optional(args, data, where)
    if origin is tuple:
        return _tuple(args, data, where)
    if origin is frozenset:
        return frozenset(_tuple((args[0], Ellipsis), data, where))
    if not isinstance(data, Mapping):
        raise _mismatch(where, "an object", data)
    return {
        _key(args[0], key, where): _value(args[1], item, _inside(where, str(key)))
        for key, item in data.items()
    }


def _key(kind: Any, key: Any, where: str) -> Any:
    """A key of a mapping: a string, which JSON writes whole numbers as, too."""
    if kind is not int:
        return str(key)
    number = whole_number(str(key))
    if number is None:
        raise _Mismatch(f"{_named(where)} must have whole numbers as keys, got {str(key)[:60]!r}.")
    return number


def _optional(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not type(None))
    for kind in others:
        try:
            return _value(kind, data, where)
        except _Mismatch:
            continue
    return _value(last, data, where)


def _tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise _mismatch(where, "a list", data)
    kinds = (args[0],) * len(data) if len(args) == 2 and args[1] is Ellipsis else args
    if len(kinds) != len(data):
        raise _mismatch(where, f"a list of {len(kinds)}", data)
    return tuple(
        _value(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
    )


def _scalar(kind: Any, data: Any, where: str) -> Any:
    if type(data) is kind or (kind is float and type(data) is int and data.bit_length() <= 1023):
        return data
    raise _mismatch(where, _KINDS.get(kind, f"of type {kind.__name__}"), data)


def to_cells(record: Any) -> dict[str, Any]:
    """The fields of `record` as a flat row, those of nested records last; infinities and NaN become None."""
    own: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            nested |= to_cells(value)
        else:
            own[field.name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return own | nested


def from_cells(
    record: type[Record],
    cells: Mapping[str, Any],
    where: str,
    what: str,
    refusal: Refusal = CheckpointError,
    *,
    text: bool = False,
) -> Record:
    """The `record` described by a flat row of JSON scalars or, with `text`, of CSV strings.

    Unknown cells are ignored, and of strings an empty one is None unless the field is a string. `where` and
    `what` name the row's location and type in error messages.

    Raises:
        CheckpointError, or the error made by `refusal`: a cell is missing or has the wrong type.
    """
    own: Any = record
    values: dict[str, Any] = {}
    for name, kind in field_kinds(own).items():
        if is_dataclass(kind):
            nested: Any = kind
            values[name] = from_cells(nested, cells, where, what, refusal, text=text)
        elif name in cells:
            try:
                cell = _from_text(kind, cells[name]) if text else cells[name]
                values[name] = _value(kind, cell, f"{where}: {name}")
            except (ValueError, OverflowError) as error:
                raise refusal(f"{where}: {name} must not be {str(cells[name])[:60]!r}") from error
            except _Mismatch as mismatch:
                raise refusal(mismatch.sentence) from mismatch
    if missing := sorted(_required(own) - values.keys()):
        raise refusal(f"{where} is no {what}: it lacks {', '.join(missing)}")
    return record(**values)


_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,4})?")
_BOOLS = {"True": True, "true": True, "False": False, "false": False}


def _from_text(kind: Any, value: Any) -> Any:
    """The text of a cell as the scalar type `kind`, which may be optional; ValueError if it is none."""
    kinds = (kind,) if get_origin(kind) in (None, Annotated) else get_args(kind)
    scalar = next(kind for kind in kinds if kind is not type(None))
    scalar = get_args(scalar)[0] if get_origin(scalar) is Annotated else scalar
    if value is None or (value == "" and scalar is not str):
        if type(None) in kinds:
            return None
        raise ValueError(value)
    if scalar is str:
        return value
    if scalar is bool:
        if value not in _BOOLS:
            raise ValueError(value)
        return _BOOLS[value]
    number = float(value) if _NUMBER.fullmatch(value) else math.nan
    if not math.isfinite(number) or (scalar is int and not number.is_integer()):
        raise ValueError(value)
    return scalar(number)
