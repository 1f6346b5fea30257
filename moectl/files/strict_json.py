"""JSON from untrusted files: UTF-8, no duplicate keys, no broken characters, bounded size and nesting."""

from __future__ import annotations

import json
import re
from typing import Any

from ..errors import CheckpointError

JSON_LIMIT = 512 << 20
"""Largest JSON text that is parsed, bytes, whatever it is; readers have tighter limits of their own."""

LFS_POINTER = b"version https://git-lfs"
"""How the text file starts that Git keeps in place of a large one."""

FETCH_AGAIN = "Download the file again, or ask its publisher for a sound one."
"""What to do about a file whose content cannot be true."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def shown(name: object, limit: int = 120) -> str:
    """`name` quoted for a message, with control characters escaped and the middle of a long one cut."""
    text = ascii(name)
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"


def refuse_lfs_pointer(start: bytes, where: str) -> None:
    """CheckpointError when a file that starts with these bytes is a Git LFS pointer."""
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{where} is a Git LFS pointer, expected the file that it stands for.",
            hint="Run `git lfs pull` in the checkpoint's folder.",
        )


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that `data` spells; `where` names the document in messages.

    Raises:
        CheckpointError: a Git LFS pointer, not UTF-8, not JSON, nested too deeply, a lone surrogate,
            a key that occurs twice in one object, or something else than an object at the top.
    """
    if len(data) > JSON_LIMIT:
        raise CheckpointError(
            f"{where} has {len(data)} bytes, more than the limit of {JSON_LIMIT}.", hint=FETCH_AGAIN
        )
    refuse_lfs_pointer(data, where)
    return _parse_plain(data) or _parse_any(data, where)


def _parse_plain(data: bytes) -> dict[str, Any] | None:
    """What `_parse_any` returns for a sound text without escapes; None for any other, or an empty object.

    A key that occurs twice is told from the number of strings: two quotes each, and none is lost.
    """
    if b"\\" in data:
        return None
    try:
        value = json.loads(data.decode("utf-8"))
        sound = isinstance(value, dict) and 2 * _strings(value) == data.count(b'"')
    except (ValueError, RecursionError):
        return None
    return value if sound else None


def _strings(value: dict[str, Any] | list[Any]) -> int:
    """How many strings an object or list holds, keys and those further in included."""
    items = value.values() if isinstance(value, dict) else value
    kinds = list(map(type, items))
    found = kinds.count(str) + (len(value) if isinstance(value, dict) else 0)
    if kinds.count(dict) or kinds.count(list):
        found += sum(_strings(item) for item in items if isinstance(item, (dict, list)))
    return found


def _parse_any(data: bytes, where: str) -> dict[str, Any]:
    """As `parse_json_object`, pair by pair."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: the name {shown(twice)} occurs twice.", hint=FETCH_AGAIN)
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
        if _SURROGATE.search(data):
            # Half a character cannot be written again, printed or be part of a file's name.
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
