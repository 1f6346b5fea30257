"""JSON Schemas of records, from their field types and the ``Attributes:`` of their docstrings."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from .records import field_kinds, is_record

Schema = dict[str, Any]

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def record_schema(record: type) -> Schema:
    """The schema of what `to_json` makes of a record: an object with all of its fields, titled as the record.

    Field types may be those that `from_json` takes, and sets.

    Example:
        >>> from moectl.problem.moe_problem import Dims
        >>> record_schema(Dims)["properties"]["hidden"]
        {'type': 'integer'}
    """
    told = _attributes(record)
    properties = {
        name: {**kind_schema(kind), **({"description": told[name]} if name in told else {})}
        for name, kind in field_kinds(record).items()
    }
    return {"title": record.__name__, "type": "object", "properties": properties, "required": [*properties]}


def cells_schema(record: type) -> Schema:
    """The schema of what `to_cells` makes of a record: a flat object, with the fields of nested records.

    Numbers may be null, which stands for infinities and NaN.
    """
    own: Schema = {}
    nested: Schema = {}
    described = record_schema(record)["properties"]
    for name, kind in field_kinds(record).items():
        if is_dataclass(kind):
            nested |= cells_schema(kind)["properties"]  # type: ignore[arg-type]
        elif float in (kind, *get_args(kind)[:1]):
            own[name] = {**described[name], "type": ["number", "null"]}
        else:
            own[name] = described[name]
    properties = own | nested
    return {"type": "object", "properties": properties, "required": [*properties]}


def kind_schema(kind: Any) -> Schema:
    """The schema of a field of type `kind`. Raises TypeError for a type that no record has."""
    if kind is Any:
        return {}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if is_record(kind):
        return record_schema(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        schema = kind_schema(args[0])
        for mark in args[1:]:
            schema |= mark.schema
        return schema
    if origin in (Union, types.UnionType):
        choices = [kind_schema(arg) for arg in args if arg is not type(None)]
        schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
        return nullable(schema) if type(None) in args else schema
    if origin is frozenset or (origin is tuple and args[-1:] == (Ellipsis,)):
        return {"type": "array", "items": kind_schema(args[0])}
    if origin is tuple:
        items = {"prefixItems": [kind_schema(arg) for arg in args]} if args else {}
        return {"type": "array", **items, "minItems": len(args), "maxItems": len(args)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": kind_schema(args[1])}
    raise TypeError(f"no schema for a field of type {kind}")


def nullable(schema: Schema) -> Schema:
    """`schema`, or null."""
    if isinstance(schema.get("type"), str) and not {"enum", "title"} & schema.keys():
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _attributes(record: type) -> dict[str, str]:
    """What the ``Attributes:`` of the docstring say of each field."""
    text = inspect.getdoc(record) or ""
    _, _, listed = text.partition("Attributes:\n")
    told: dict[str, str] = {}
    for entry in re.split(r"\n    (?=\S)", f"\n{listed}"):
        names, colon, says = entry.partition(": ")
        words = [name.strip() for name in names.split(",")]
        if colon and all(word.isidentifier() for word in words):
            told |= dict.fromkeys(words, " ".join(says.replace("``", "").replace("`", "").split()))
    return told
