"""Conversion of records (dataclasses, named tuples) from and to JSON and table rows, by their field types.

msgspec 0.22 was tried and does not replace it: it ignores unknown fields of a dataclass, stops at the first
error, and does not report the offending value.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import CheckpointError

Record = TypeVar("Record")
Refusal = Callable[[str], Exception]
"""An exception class, or a function that makes an exception from a sentence."""


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

    Field types may be str, int, float, bool, Any, records, unions of these with None, tuples, frozen sets
    and mappings of these with string keys. A bool is not accepted as an int; an int is accepted as a float,
    and not converted. Fields with a default may be absent, so that records can be extended. `where` is the
    path of `data` in error messages.

    Raises:
        CheckpointError, or the error made by `refusal`: a field is missing, unknown or of the wrong type,
            or the record's constructor rejects the values.

    Example:
        >>> from moectl.problem.moe_problem import Dims
        >>> from_json(Dims, {"hidden": 2880, "intermediate": "2880"}, "dims")
        Traceback (most recent call last):
        moectl.errors.CheckpointError: dims.intermediate must be of type int, got str '2880'
    """
    try:
        built: Record = _record(record, data, where)
    except _Mismatch as mismatch:
        raise refusal(mismatch.sentence) from mismatch.__cause__
    return built


class _Mismatch(Exception):
    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


def _mismatch(where: str, expected: str, got: Any) -> _Mismatch:
    return _Mismatch(f"{where} must be {expected}, got {type(got).__name__} {str(got)[:60]!r}.")


@cache
def is_record(kind: Any) -> bool:
    return is_dataclass(kind) or (
        isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    )


@cache
def field_kinds(record: Any) -> Mapping[str, Any]:
    """The types of a record's fields, by name."""
    hints = get_type_hints(record)
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
    if missing or unknown:
        parts = [f"is incomplete: it lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown fields {', '.join(map(str, unknown))}"] if unknown else []
        raise _Mismatch(f"{where} {' and '.join(parts)}.")
    values = {name: _value(kinds[name], item, f"{where}.{name}") for name, item in data.items()}
    try:
        return record(**values)
    except (TypeError, ValueError) as error:
        raise _Mismatch(f"{where} is not valid: {error}.") from error


def _value(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if is_record(kind):
        return _record(kind, data, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin is None:
        return _scalar(kind, data, where)
    if origin in (Union, types.UnionType):
        return _optional(args, data, where)
    if origin is tuple:
        return _tuple(args, data, where)
    if origin is frozenset:
        return frozenset(_tuple((args[0], Ellipsis), data, where))
    if not isinstance(data, Mapping):
        raise _mismatch(where, "an object", data)
    return {str(key): _value(args[1], item, f"{where}.{key}") for key, item in data.items()}


def _optional(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    (kind,) = (kind for kind in kinds if kind is not type(None))
    return _value(kind, data, where)


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
    raise _mismatch(where, f"of type {kind.__name__}", data)


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
) -> Record:
    """The `record` described by a flat row of JSON scalars or of CSV strings.

    Unknown cells are ignored, and an empty string is None unless the field is a string. `where` and `what`
    name the row's location and type in error messages.

    Raises:
        CheckpointError, or the error made by `refusal`: a cell is missing or has the wrong type.
    """
    own: Any = record
    values: dict[str, Any] = {}
    for name, kind in field_kinds(own).items():
        if is_dataclass(kind):
            nested: Any = kind
            values[name] = from_cells(nested, cells, where, what, refusal)
        elif name in cells:
            try:
                values[name] = _from_cell(kind, cells[name])
            except (ValueError, OverflowError) as error:
                raise refusal(f"{where}: {name} must not be {cells[name]!r}") from error
    if missing := sorted(_required(own) - values.keys()):
        raise refusal(f"{where} is no {what}: it lacks {', '.join(missing)}")
    return record(**values)


_BOOLS = {"True": True, "true": True, "False": False, "false": False}


def _from_cell(kind: Any, value: Any) -> Any:
    """A cell converted to the scalar type `kind`, which may be optional; ValueError if it does not match."""
    kinds = get_args(kind) or (kind,)
    scalar = next(kind for kind in kinds if kind is not type(None))
    if value is None or (value == "" and scalar is not str):
        if type(None) in kinds:
            return None
        raise ValueError(value)
    if scalar is str:
        if not isinstance(value, str):
            raise ValueError(value)
        return value
    if scalar is bool:
        if str(value) not in _BOOLS:
            raise ValueError(value)
        return _BOOLS[str(value)]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(value)
    number = float(value)
    if not math.isfinite(number) or (scalar is int and number != int(number)):
        raise ValueError(value)
    return int(number) if scalar is int and isinstance(value, str) else scalar(value)
