"""In which releases of an engine a name was known: an environment variable, a backend, an exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..environment.package_probes import release_numbers

numbers = cache(release_numbers)


@dataclass(frozen=True, slots=True)
class NameHistory:
    """By name, the first release that knew it and the first that did not; several pairs if it came back.

    The second is empty if the name is still known. Releases before the first pair did not know it, or were
    not read.
    """

    spans: Mapping[str, tuple[tuple[str, str], ...]]

    def at(self, release: str) -> frozenset[str]:
        """The names that `release` knows."""
        return frozenset(name for name in self.spans if self.knows(name, release))

    def knows(self, name: str, release: str) -> bool:
        """True if `release` knows `name`."""
        return any(
            numbers(first) <= numbers(release) and (not gone or numbers(release) < numbers(gone))
            for first, gone in self.spans.get(name, ())
        )

    def dropped(self, name: str, release: str) -> str:
        """The release, up to `release`, that dropped `name`; empty if `release` knows it, or none did."""
        if self.knows(name, release):
            return ""
        gone = [end for _, end in self.spans.get(name, ()) if end and numbers(end) <= numbers(release)]
        return gone[-1] if gone else ""

    def added(self, name: str, release: str) -> str:
        """The first release after `release` with `name`; empty if there is none."""
        later = [first for first, _ in self.spans.get(name, ()) if numbers(first) > numbers(release)]
        return later[0] if later else ""


@dataclass(frozen=True, slots=True)
class ReleaseNames:
    """The histories of an engine's environment variables, backends and exchanges.

    Attributes:
        deprecated: variables that a release reads, with a warning that a later one will not.
        requires: by release and package (as in package metadata), the version that it requires.
    """

    variables: NameHistory
    backends: NameHistory
    exchanges: NameHistory
    deprecated: NameHistory
    requires: Mapping[str, Mapping[str, str]]


def read_names(path: Path) -> ReleaseNames:
    """The histories of names in a file that `scripts/engines/record_names` wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return ReleaseNames(
        variables=_history(document["variables"]),
        backends=_history(document["moe_backend"]),
        exchanges=_history(document["all2all_backend"]),
        deprecated=_history(document["deprecated"]),
        requires=document["requires"],
    )


def read_history(path: Path, kind: str) -> NameHistory:
    """The history of one `kind` of names in such a file."""
    return _history(json.loads(path.read_text(encoding="utf-8"))[kind])


def _history(spans: Mapping[str, list[list[str]]]) -> NameHistory:
    return NameHistory({name: tuple((first, gone) for first, gone in known) for name, known in spans.items()})
