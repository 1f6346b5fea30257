"""Frozen records to JSON and back, every field checked on the way in."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import CheckpointError

Record = TypeVar("Record")


def to_json(value: Any) -> Any:
    """`value` as JSON data: records become objects of their fields, tuples become lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def from_json(record: type[Record], data: Any, where: str) -> Record:
    """The `record` (a dataclass type) that `data` describes, built only when every field has its type.

    Field types may be str, int, float, bool, Any, records, optional ones, tuples and mappings of
    these with string keys. A bool is no int here. A field with a default may be absent, so that a
    record can gain fields. `where` names the place in messages.

    Raises:
        CheckpointError: a field is missing, unknown or of another type.
    """
    built: Record = _record(record, data, where)
    return built


@cache
def _hints(record: type) -> Mapping[str, Any]:
    return get_type_hints(record)


def _refuse(where: str, expected: str, got: Any) -> CheckpointError:
    return CheckpointError(f"{where} must be {expected}, got {type(got).__name__} {str(got)[:60]!r}.")


def _record(record: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _refuse(where, "an object", data)
    hints = _hints(record)
    names = {field.name for field in fields(record)}
    needed = {f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING}
    missing, unknown = sorted(needed - set(data)), sorted(set(data) - names)
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown fields {', '.join(map(str, unknown))}"] if unknown else []
        raise CheckpointError(f"{where} {' and '.join(parts)}.")
    return record(**{name: _value(hints[name], data[name], f"{where}.{name}") for name in data})


def _value(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if is_dataclass(kind):
        return _record(kind, data, where)  # type: ignore[arg-type]
    origin, args = get_origin(kind), get_args(kind)
    if origin is None:
        return _scalar(kind, data, where)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        rest = [arg for arg in args if arg is not type(None)]
        return _value(rest[0], data, where)
    if origin is tuple:
        return _tuple(args, data, where)
    if not isinstance(data, Mapping):
        raise _refuse(where, "an object", data)
    return {str(key): _value(args[1], item, f"{where}.{key}") for key, item in data.items()}


def _tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise _refuse(where, "a list", data)
    kinds = (args[0],) * len(data) if len(args) == 2 and args[1] is Ellipsis else args
    if len(kinds) != len(data):
        raise _refuse(where, f"a list of {len(kinds)}", data)
    return tuple(
        _value(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
    )


def _scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if kind is type(None) or type(data) is not kind:
        raise _refuse(where, f"of type {kind.__name__}", data)
    return data
