"""JSON Schemas (draft 2020-12) of the documents that commands print with ``--json``.

Objects are open: a later moectl may add keys under the same ``schema_version``, never remove or rename one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import SCHEMA_VERSION
from .conversions import convert, parity, refit, synth, unconvert, verify
from .decisions import explain
from .json_types import ERROR, STRING, Schema, obj
from .machine import doctor, env, list_names, peers
from .measurements import bench, compare, run, tune, warm
from .serving import serve_check

DIALECT = "https://json-schema.org/draft/2020-12/schema"

DOCUMENTS: dict[str, Callable[[], Schema]] = {
    "explain": explain,
    "convert": convert,
    "verify": verify,
    "serve-check": serve_check,
    "unconvert": unconvert,
    "refit": refit,
    "parity": parity,
    "run": run,
    "bench": bench,
    "tune": tune,
    "warm": warm,
    "compare": compare,
    "peers": peers,
    "synth": synth,
    "list": list_names,
    "doctor": doctor,
    "env": env,
}
"""What follows the head of a document, by command."""


def schema_of(command: str) -> dict[str, Any]:
    """The schema of everything that `command` prints with ``--json``: its document, or an error.

    Raises KeyError for a command without documents.
    """
    head = {
        "schema_version": {"const": SCHEMA_VERSION},
        "moectl": {**STRING, "description": "Version of moectl."},
        "command": {"const": command},
    }

    def headed(schema: Schema) -> Schema:
        if "anyOf" in schema:
            return {**schema, "anyOf": [headed(choice) for choice in schema["anyOf"]]}
        properties, required = {**head, **schema["properties"]}, [*head, *schema["required"]]
        return {**schema, "properties": properties, "required": required}

    named: dict[str, Schema] = {}
    definitions = {
        "document": _shared(headed(DOCUMENTS[command]()), named),
        "failure": headed(obj({"error": ERROR})),
    }
    return {
        "$schema": DIALECT,
        "title": f"moectl {command} --json",
        "description": "Objects may have further keys: a later version may add some.",
        "anyOf": [{"$ref": "#/$defs/document"}, {"$ref": "#/$defs/failure"}],
        "$defs": {**definitions, **named},
    }


def _shared(schema: Any, named: dict[str, Schema]) -> Any:
    """`schema` with references to titled objects, which are put into `named`.

    One that has the title of another, but is not equal to it, stays where it is.
    """
    if isinstance(schema, list):
        return [_shared(item, named) for item in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: _shared(part, named) for name, part in schema.items()}
    title = schema.get("title")
    if not isinstance(title, str) or named.setdefault(title, parts) != parts:
        return parts
    return {"$ref": f"#/$defs/{title}"}
