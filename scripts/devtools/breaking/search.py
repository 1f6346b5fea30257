"""Cases for readers, one after another, and the smallest input that shows each kind of defect."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .changes import changed_document, paths
from .outcomes import Defect, defect_of

SHRINK_SECONDS = 20.0
"""For how long a defect's input is made smaller."""

Change = Callable[[random.Random, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Reader:
    """A reader of untrusted input.

    Attributes:
        name: the kind of input, and what reads it.
        seeds: good inputs, from which others are made.
        read: reads an input and returns what it printed; raises what the reader raises.
        share: how many of a thousand cases it gets when all readers are tried, by what a case costs.
        change: makes an input of the seeds.
        lines: whether each line of an input is a document.
        split: the part of an input that is made smaller, and what puts another in its place.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], str]
    share: float = 1.0
    change: Change = changed_document
    lines: bool = False
    split: Callable[[bytes], tuple[bytes, Callable[[bytes], bytes]]] = lambda data: (data, lambda part: part)


@dataclass
class Finding:
    """One kind of defect of a reader: the first case, its input made small, and how often it occurred."""

    reader: str
    defect: Defect
    seed: str
    data: bytes
    count: int = 1


@dataclass
class Search:
    """The cases that were tried, by reader, with their seconds and the kinds of defects found."""

    seed: int
    cases: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    found: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def unchanged(self, reader: Reader) -> None:
        """AssertionError if a good input is taken for a wrong one."""
        for data in reader.seeds[:50]:
            defect = defect_of(partial(reader.read, data))
            assert defect is None, f"{reader.name}, unchanged: {defect}: {data[:300]!r}"

    def case(self, reader: Reader, number: int) -> Finding | None:
        """Tries one changed input, which follows from the seed, the reader's name and the number."""
        return self.given(reader, self._named(reader, number), self.input(reader, number))

    def input(self, reader: Reader, number: int) -> bytes:
        """The changed input of that number."""
        return reader.change(random.Random(self._named(reader, number)), reader.seeds)

    def _named(self, reader: Reader, number: int) -> str:
        return f"{self.seed} {reader.name} {number}"

    def given(self, reader: Reader, seed: str, data: bytes) -> Finding | None:
        """Tries one input; the finding if it is the first of its kind."""
        begin = time.perf_counter()
        defect = defect_of(partial(reader.read, data))
        self.seconds[reader.name] += time.perf_counter() - begin
        self.cases[reader.name] += 1
        if defect is None:
            return None
        key = (reader.name, defect.kind)
        if key in self.found:
            self.found[key].count += 1
            return None
        smallest = smaller(reader, data, defect.kind)
        self.found[key] = Finding(reader.name, defect, seed, smallest)
        return self.found[key]

    def to_json(self) -> dict[str, Any]:
        """The counts and findings as plain data."""
        findings = [
            {
                "reader": found.reader,
                "kind": found.defect.kind,
                "words": found.defect.words,
                "case": found.seed,
                "count": found.count,
                "input": found.data[:4000].decode("utf-8", "backslashreplace"),
            }
            for found in self.found.values()
        ]
        readers = {
            name: {"cases": count, "seconds": round(self.seconds[name], 3)}
            for name, count in sorted(self.cases.items())
        }
        return {"seed": self.seed, "cases": self.cases.total(), "readers": readers, "defects": findings}


def shares(readers: Sequence[Reader], cases: int) -> Iterator[tuple[Reader, int]]:
    """The numbered cases of each reader, `cases` in all, by the readers' shares."""
    whole = sum(reader.share for reader in readers)
    for reader in readers:
        for number in range(max(1, round(cases * reader.share / whole))):
            yield reader, number


def smaller(reader: Reader, data: bytes, kind: str) -> bytes:
    """A small input that shows the same kind of defect as `data`."""
    end = time.monotonic() + SHRINK_SECONDS

    def shows(candidate: bytes) -> bool:
        defect = defect_of(partial(reader.read, candidate))
        return defect is not None and defect.kind == kind

    if kind in ("time", "memory"):
        return data
    part, whole = reader.split(data)
    if whole(part) != data:
        part, whole = data, bytes
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for candidate in _candidates(part):
            if time.monotonic() > end:
                break
            if len(candidate) < len(part) and shows(whole(candidate)):
                part, progress = candidate, True
                break
    return whole(part)


def _candidates(data: bytes) -> Iterator[bytes]:
    """Inputs with a part of `data` left out: members of JSON, then bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, (dict, list)):
        for path in sorted(paths(document), key=len):
            if path:
                yield json.dumps(_without(document, path)).encode()
    width = len(data) // 2
    while width:
        for start in range(0, len(data), width):
            yield data[:start] + data[start + width :]
        width //= 2


def _without(document: Any, path: Sequence[Any]) -> Any:
    """A copy of `document` without what is at `path`."""
    (key, *rest) = path
    if isinstance(document, dict):
        items = {
            name: _without(item, rest) if name == key and rest else item for name, item in document.items()
        }
        return items if rest else {name: item for name, item in items.items() if name != key}
    kept = [_without(item, rest) if n == key and rest else item for n, item in enumerate(document)]
    return kept if rest else kept[:key] + kept[key + 1 :]
