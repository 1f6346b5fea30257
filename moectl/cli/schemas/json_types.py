"""Parts of schemas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...files.record_schemas import Schema as Schema
from ...files.record_schemas import nullable as nullable

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BYTES: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OPTIONAL_STRING = nullable(STRING)
OPTIONAL_NUMBER = nullable(NUMBER)
OPTIONAL_BYTES = nullable(BYTES)


def obj(properties: Mapping[str, Schema], optional: Iterable[str] = (), about: str = "") -> Schema:
    """An object; its properties are required except those in `optional`."""
    left_out = set(optional)
    return said(
        {
            "type": "object",
            "properties": dict(properties),
            "required": [name for name in properties if name not in left_out],
        },
        about,
    )


def array(items: Schema, about: str = "") -> Schema:
    """A list of `items`."""
    return said({"type": "array", "items": items}, about)


def mapping(values: Schema, about: str = "") -> Schema:
    """An object from names to `values`."""
    return said({"type": "object", "additionalProperties": values}, about)


def one_of(*words: str | None, about: str = "") -> Schema:
    """One of these words."""
    return said({"enum": list(words)}, about)


def said(schema: Schema, about: str) -> Schema:
    """`schema` with a description."""
    return {**schema, "description": about} if about else schema


STRINGS = array(STRING)
LAYERS = array(INTEGER, "Numbers of layers.")

ERROR = obj(
    {
        "what": said(STRING, "What is wrong: what was expected, and what was found."),
        "reason": said(STRING, "Why it matters or where it comes from; may be empty."),
        "hint": said(STRING, "What to do next; may be empty."),
        "exit_code": INTEGER,
    },
    about="An error, as printed to stderr.",
)
