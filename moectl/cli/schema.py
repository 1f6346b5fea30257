"""`moectl schema`: the JSON Schema of what a command prints with ``--json``."""

import json
from collections.abc import Iterable
from typing import Annotated

import typer

from .options import framed, pick
from .output import Output

EXAMPLES = (
    "moectl schema explain > explain.schema.json",
    "moectl explain ./ckpt --gpu h200 --json | check-jsonschema --schemafile explain.schema.json -",
)


def commands() -> Iterable[str]:
    """Commands that have a schema."""
    from .schemas import DOCUMENTS

    return DOCUMENTS


def _completed(incomplete: str) -> list[str]:
    return [name for name in commands() if name.startswith(incomplete)]


@framed("schema")
def schema(
    command: Annotated[
        str, typer.Argument(metavar="COMMAND", help="Such as explain.", autocompletion=_completed)
    ],
    *,
    out: Output,
) -> None:
    """Print the JSON Schema of a command's --json.

    Draft 2020-12; it covers the command's documents and its errors. Validators ignore keys that it does not
    list: a later moectl may add some.
    """
    from .schemas import schema_of

    out.text(json.dumps(schema_of(pick(command, commands(), "command")), indent=2))
