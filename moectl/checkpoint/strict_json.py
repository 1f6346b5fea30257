"""JSON from untrusted files: UTF-8, no duplicate keys, bounded size and nesting."""

from __future__ import annotations

import json
from typing import Any

from ..errors import CheckpointError

DOCUMENT_LIMIT = 512 << 20
"""Largest JSON document that is read, bytes; the index of a model with 10^6 tensors is half of it."""


def shown(name: object, limit: int = 120) -> str:
    """`name` quoted for a message, with control characters escaped and the middle of a long one cut."""
    text = ascii(name)
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that `data` spells; `where` names the document in messages.

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deeply, a key that occurs twice in one
            object, or something else than an object at the top.
    """
    if len(data) > DOCUMENT_LIMIT:
        raise CheckpointError(f"{where} has {len(data)} bytes, more than the limit of {DOCUMENT_LIMIT}.")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: the name {shown(twice)} occurs twice.")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8: bad byte at offset {error.start}.") from error
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply to be a checkpoint's.") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must be a JSON object, got {type(value).__name__}.")
    return value
