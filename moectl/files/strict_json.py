"""JSON from untrusted files: UTF-8, no duplicate keys, no broken characters, bounded size and nesting."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError

JSON_LIMIT = 512 << 20
"""Maximum size of any JSON text, bytes; most readers have tighter limits."""

LFS_POINTER = b"version https://git-lfs"
"""First bytes of the pointer file that Git LFS stores instead of a large file."""

FETCH_AGAIN = "Download the file again, or ask its publisher for a sound one."
"""Hint for damaged files."""

VALUES_LIMIT = 4_000_000
"""Most values of a JSON text, which take far more memory than their text; one for each comma and bracket."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def shown(name: object, limit: int = 120) -> str:
    """`name` quoted for a message: non-ASCII and control characters escaped, the middle of long ones cut.

    Example:
        >>> shown("gate\\x1b.weight")
        "'gate\\\\x1b.weight'"
    """
    text = ascii(name)
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"


def refuse_lfs_pointer(start: bytes, where: str) -> None:
    """CheckpointError when `start`, the first bytes of a file, are those of a Git LFS pointer."""
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{where} is a Git LFS pointer, expected the file that it stands for.",
            hint="Run `git lfs pull` in the checkpoint's folder.",
        )


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` names the document in error messages.

    Raises:
        CheckpointError: a Git LFS pointer, not UTF-8, not JSON, nested too deeply, a lone surrogate,
            a key that occurs twice in one object, or something else than an object at the top.
    """
    if len(data) > JSON_LIMIT:
        raise CheckpointError(
            f"{where} has {len(data)} bytes, more than the limit of {JSON_LIMIT}.", hint=FETCH_AGAIN
        )
    refuse_lfs_pointer(data, where)
    if (values := count_values(data)) > VALUES_LIMIT:
        raise CheckpointError(
            f"{where} has {values} values, expected at most {VALUES_LIMIT}.", hint=FETCH_AGAIN
        )
    return _parse_plain(data) or _parse_any(data, where)


def count_values(data: bytes) -> int:
    """At least the number of values in a JSON text, which is not parsed."""
    return data.count(b",") + data.count(b"{") + data.count(b"[")


def _parse_plain(data: bytes) -> dict[str, Any] | None:
    """A fast `_parse_any` for valid texts without escapes; None for any other, and for an empty object.

    A duplicate key is detected by counting: every string in the result accounts for two quotes.
    """
    if b"\\" in data:
        return None
    try:
        value = json.loads(data.decode("utf-8"))
        valid = isinstance(value, dict) and 2 * _strings(value) == data.count(b'"')
    except (ValueError, RecursionError):
        return None
    return value if valid else None


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """The file that moectl writes for a JSON object: indented, in UTF-8.

    Example:
        >>> json_bytes({"a": 1})
        b'{\\n  "a": 1\\n}\\n'
    """
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _strings(value: dict[str, Any] | list[Any]) -> int:
    """The number of strings in an object or list, including keys and nested values."""
    items = value.values() if isinstance(value, dict) else value
    kinds = list(map(type, items))
    count = kinds.count(str) + (len(value) if isinstance(value, dict) else 0)
    if kinds.count(dict) or kinds.count(list):
        count += sum(_strings(item) for item in items if isinstance(item, (dict, list)))
    return count


def _parse_any(data: bytes, where: str) -> dict[str, Any]:
    """`parse_json_object` with a check of every key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: the name {shown(twice)} occurs twice.", hint=FETCH_AGAIN)
        return entries

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
        if _SURROGATE.search(data):
            # A lone surrogate can be neither printed nor written, and cannot be part of a file name.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{where} is not UTF-8: bad byte at offset {error.start}.", hint=FETCH_AGAIN
        ) from error
    except UnicodeEncodeError as error:
        half = shown(error.object[error.start])
        raise CheckpointError(f"{where} holds a lone surrogate, {half}.", hint=FETCH_AGAIN) from error
    except RecursionError as error:
        raise CheckpointError(
            f"{where} is nested too deeply to be a checkpoint's.", hint=FETCH_AGAIN
        ) from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{where} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}.",
            hint="Correct it there, or download it again.",
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}.", hint=FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must be a JSON object, got {type(value).__name__}.", hint=FETCH_AGAIN)
    return value
