"""JSON from untrusted files: UTF-8, no duplicate keys, no broken characters, bounded size and nesting.

`parse_json_object` is for checkpoints' files, `parse_document` for what moectl itself has written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

JSON_LIMIT = 512 << 20
"""Maximum size of any JSON text, bytes; most readers have tighter limits."""

DEEPEST = 100
"""Objects and lists inside each other in any JSON text. Checkpoints have less than 20, and what is nested
deeper than Python's stack would fail wherever it is used."""

LARGEST_NUMBER = 1 << 63
"""Whole numbers of documents are smaller, whatever their sign."""

Refusal = Callable[[str], Exception]
"""An exception class, or a function that makes an exception from a sentence."""

LFS_POINTER = b"version https://git-lfs"
"""First bytes of the pointer file that Git LFS stores instead of a large file."""

FETCH_AGAIN = "Download the file again, or report it to the publisher."
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


def json_words(value: object) -> str:
    """`value` in JSON's words, for errors.

    Example:
        >>> [json_words(value) for value in (None, True, 3, "x", [1], {})]
        ['null', 'true', 'the number 3', "the string 'x'", 'a list', 'an object']
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return f"the number {str(value)[:60]}"
    if isinstance(value, str):
        return f"the string {value[:60]!r}"
    return "an object" if isinstance(value, Mapping) else "a list"


def parse_document(data: bytes | str, where: str, refusal: Refusal = CheckpointError) -> dict[str, Any]:
    """The JSON object in `data`, a document that moectl has written; `where` names it in error messages.

    Beyond `parse_json_object` its numbers are finite, and whole ones below `LARGEST_NUMBER`.

    Raises:
        CheckpointError, or the error made by `refusal`, with one sentence that names the place.
    """
    value = parse_value(data, where, refusal)
    if not isinstance(value, dict):
        raise refusal(f"{where} must be a JSON object, got {json_words(value)}.")
    return value


def parse_value(data: bytes | str, where: str, refusal: Refusal = CheckpointError) -> Any:
    """`parse_document` of any JSON value."""
    unusable: list[_Unusable] = []

    def keep(text: str) -> _Unusable:
        unusable.append(_Unusable(text))
        return unusable[-1]

    def whole(text: str) -> Any:
        # 20 characters are a sign and 19 digits; Python refuses to convert thousands of them.
        number = int(text) if len(text) <= 20 else LARGEST_NUMBER
        return number if abs(number) < LARGEST_NUMBER else keep(text)

    def real(text: str) -> Any:
        number = float(text)
        return keep(text) if number in (float("inf"), float("-inf")) else number

    hooks = {"parse_int": whole, "parse_float": real, "parse_constant": keep}
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    try:
        if len(raw) > JSON_LIMIT:
            raise CheckpointError(
                f"{where} has {len(raw)} bytes, more than the limit of {JSON_LIMIT}", hint=FETCH_AGAIN
            )
        if (values := count_values(raw)) > VALUES_LIMIT:
            raise CheckpointError(
                f"{where} has {values} values, expected at most {VALUES_LIMIT}", hint=FETCH_AGAIN
            )
        value = _loaded(raw, where, **hooks)
    except CheckpointError as error:
        raise refusal(error.what) from error
    if unusable:
        found = next(found for found in leaves(value) if isinstance(found[1], _Unusable))
        text = found[1].text
        raise refusal(
            f"{where}: {found[0]} must be a finite number of at most 64 bits, got "
            f"{text if len(text) <= 40 else f'one of {len(text)} characters'}"
        )
    return value


@dataclass(frozen=True)
class _Unusable:
    """A number that is none, or does not fit."""

    text: str


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What objects and lists hold at last, each with its path, such as ``rows[3].us``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]")
    else:
        yield path, value


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
        valid = isinstance(value, dict) and not _too_deep(value)
        valid = valid and 2 * _strings(value) == data.count(b'"')
    except (ValueError, RecursionError):
        return None
    return value if valid else None


def _too_deep(value: Any) -> bool:
    """True if more than `DEEPEST` objects and lists are inside each other."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


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
    value = _loaded(data, where)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must be a JSON object, got {json_words(value)}.", hint=FETCH_AGAIN)
    return value


def _loaded(data: bytes, where: str, **hooks: Any) -> Any:
    """The checked JSON value in `data`; `hooks` of `json.loads` make the numbers."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: the name {shown(twice)} occurs twice.", hint=FETCH_AGAIN)
        return entries

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, **hooks)
        if isinstance(value, (dict, list)) and _too_deep(value):
            raise RecursionError
        if _SURROGATE.search(data):
            # A lone surrogate can be neither printed nor written, and cannot be part of a file name.
            json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{where} is not UTF-8: bad byte at offset {error.start}.", hint=FETCH_AGAIN
        ) from error
    except UnicodeEncodeError as error:
        half = shown(error.object[error.start])
        raise CheckpointError(f"{where} holds a lone surrogate, {half}.", hint=FETCH_AGAIN) from error
    except RecursionError as error:
        raise CheckpointError(
            f"{where} is nested too deeply: at most {DEEPEST} objects and lists may be inside each other.",
            hint=FETCH_AGAIN,
        ) from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{where} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}.",
            hint="Correct it there, or download it again.",
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}.", hint=FETCH_AGAIN) from error
    return value
