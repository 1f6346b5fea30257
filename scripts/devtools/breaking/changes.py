"""Changed documents: by their structure, by pieces of each other, and by their bytes alone."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

HOSTILE = (
    "\x1b[31mred\x1b]0;title\x07",
    "next\x85line\u2028sep\u2029",
    "\u202egnp.exe\u2066\u200f",
    "[/x] [bold]b[/] {0} %s $\\frac$",
    "\ud800",
    "a\nmoectl: error: b\r\t\x00",
    "<script>alert(1)</script>|`*",
    "../../etc/passwd",
    "",
    "9" * 5000,
    "\u0663\u00b2",
    "x" * 20000,
)
NUMBERS: tuple[float, ...] = (
    0, -1, 1, 2, 3, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**400,
    0.5, 1e308, -0.0, 1e-320,
)  # fmt: skip
CONSTANTS = ("NaN", "Infinity", "-Infinity", "1e999", "9" * 6000, "-0", "1E2", "1.0", "-0.0", "1e0")
MOST_VALUES = 2000
"""A document of more values is changed no further: pieces of it, repeated, would become gigabytes."""

PLACEHOLDER = "\ue000placeholder\ue000"


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value inside a JSON value, and of itself."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def at(value: Any, path: Sequence[Any]) -> Any:
    """The value at a place."""
    for key in path:
        value = value[key]
    return value


def _another(dice: random.Random, value: Any) -> Any:
    """A value to put in the place of `value`."""
    choice = dice.randrange(8)
    if choice < 2:
        return dice.choice(HOSTILE)
    if choice < 4:
        return dice.choice(NUMBERS)
    if choice == 4:
        return dice.choice((None, True, False, [], {}, [[]], {"": None}, [value], {"a": value}))
    if choice == 5:
        return PLACEHOLDER
    if choice == 6 and isinstance(value, (int, float)):
        return dice.choice((-value, f"{value}"[:40], bool(value), value * 2, [value], (value % 9) / 4))
    return f"{value}{dice.choice(HOSTILE)}"


def changed_value(dice: random.Random, document: Any, others: Sequence[Any] = ()) -> Any:
    """`document` with a change or a few; some are pieces of `others`, documents of the same kind."""
    document = copy.deepcopy(document)
    for _ in range(dice.choice((1, 1, 1, 1, 2, 3, 8))):
        places = list(paths(document))
        if len(places) > MOST_VALUES:
            break
        path = dice.choice(places)
        if not path:
            continue
        holder, key = at(document, path[:-1]), path[-1]
        choice = dice.randrange(12 if others else 10)
        if choice < 6:
            holder[key] = _another(dice, holder[key])
        elif choice == 6:
            del holder[key]
        elif choice == 7 and isinstance(holder, dict):
            holder[dice.choice((*HOSTILE, "unknown"))] = dice.choice((1, "x", None, holder[key]))
        elif choice == 7:
            holder.extend([copy.deepcopy(holder[key])] * dice.choice((1, 2, 50)))
        elif choice == 8:
            holder[key] = copy.deepcopy(at(document, dice.choice(places)[:1] or path))
        elif choice > 9:
            _graft(dice, holder, key, dice.choice(others))
        elif isinstance(holder, dict):
            holder[dice.choice(HOSTILE)] = holder.pop(key)
        else:
            dice.shuffle(holder)
    return document


def _graft(dice: random.Random, holder: Any, key: Any, other: Any) -> None:
    """Puts a piece of another document beside, or in the place of, what is at `key`."""
    path = dice.choice(list(paths(other)))
    piece = copy.deepcopy(at(other, path))
    if isinstance(holder, dict) and path and isinstance(path[-1], str):
        holder[path[-1]] = piece
    else:
        holder[key] = piece


def as_text(dice: random.Random, document: Any) -> bytes:
    """A changed document as JSON, with what Python's JSON does not write in some places."""
    separators = dice.choice((None, (",", ":")))
    indent = None if separators else dice.choice((None, None, 1))
    text = json.dumps(document, ensure_ascii=dice.random() < 0.7, indent=indent, separators=separators)
    while PLACEHOLDER in text or json.dumps(PLACEHOLDER) in text:
        depth = dice.choice((3, 60, 99, 100, 101, 500, 5000, 100_000))
        deep = dice.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
        constant = dice.choice((*CONSTANTS, deep))
        for spelled in (json.dumps(PLACEHOLDER), f'"{PLACEHOLDER}"'):
            text = text.replace(spelled, constant, 1)
        text = text.replace(PLACEHOLDER, "y").replace(json.dumps(PLACEHOLDER)[1:-1], "y")
    return text.encode("utf-8", "surrogatepass")


def changed_bytes(dice: random.Random, data: bytes) -> bytes:
    """`data` cut, flipped, repeated or with other bytes inside."""
    place, other = dice.randrange(len(data) + 1), dice.randrange(len(data) + 1)
    choice = dice.randrange(6)
    if choice == 0:
        return data[:place]
    if choice == 1 and data:
        flipped = bytearray(data)
        for _ in range(dice.choice((1, 1, 4))):
            flipped[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return bytes(flipped)
    if choice == 2:
        return data[: min(place, other)] + data[max(place, other) :]
    if choice == 3:
        return data[:place] + dice.choice(HOSTILE).encode("utf-8", "surrogatepass") + data[place:]
    if choice == 4:
        return data[:place] + data[min(place, other) : max(place, other)][:2000] + data[place:]
    return dice.choice((b"", b"\n", b"null", b"[]", b"{}", b"\xff\xfe", b"\xef\xbb\xbf" + data, b"\0" * 64))


def changed_document(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of `seeds` changed: JSON by its structure, mostly, anything else by its bytes."""
    data = dice.choice(seeds)
    if dice.random() < 0.15:
        return changed_bytes(dice, data)
    try:
        return as_text(dice, changed_value(dice, json.loads(data), [json.loads(dice.choice(seeds))]))
    except ValueError:
        return changed_bytes(dice, data)


def changed_lines(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of `seeds`, whose lines are JSON documents, with a line changed or left out."""
    data = dice.choice(seeds)
    if dice.random() < 0.15:
        return changed_bytes(dice, data)
    lines = data.splitlines()
    number = dice.randrange(len(lines))
    lines[number] = as_text(dice, changed_value(dice, json.loads(lines[number]))).replace(b"\n", b" ")
    if dice.random() < 0.1:
        lines.pop(dice.randrange(len(lines)))
    return b"\n".join(lines) + b"\n"


def with_hostile_fields(data: bytes, lines: bool) -> Iterator[bytes]:
    """A document with hostile text in one of its fields after the other, those of lists once."""
    try:
        documents = [json.loads(line) for line in (data.splitlines() if lines else [data])]
    except ValueError:
        return
    texts = [json.dumps(document).encode() for document in documents]
    ending = b"\n" if lines else b""
    for number, document in enumerate(documents):
        seen = set()
        for path in paths(document):
            place = tuple(0 if isinstance(key, int) else key for key in path)
            if path and place not in seen and isinstance(at(document, path), str):
                seen.add(place)
                changed = copy.deepcopy(document)
                at(changed, path[:-1])[path[-1]] += "".join(HOSTILE[:9])
                yield (
                    b"\n".join([*texts[:number], json.dumps(changed).encode(), *texts[number + 1 :]]) + ending
                )
