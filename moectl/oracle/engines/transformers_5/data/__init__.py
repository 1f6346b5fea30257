"""Model types of transformers releases: the newest whole, an older one as what differs from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Models:
    """Values of `model_type` that a release knows.

    Attributes:
        known: all of them.
        own: models whose experts have one forward, whatever implementation is asked for.
        normed: models with a norm after each expert.
    """

    known: frozenset[str]
    own: frozenset[str]
    normed: frozenset[str]


@cache
def models(version: str) -> Models:
    """The models of the release `version`, which must be one in the data."""
    return dict(_releases())[version]


def _releases() -> Iterator[tuple[str, Models]]:
    document: dict[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    newer: Models | None = None
    for version, row in document.items():
        gone = frozenset(row.get("without", ()))
        own = frozenset(row.get("own", ()))
        if newer is None:
            known = frozenset(row["experts"]) | frozenset(row["others"])
            newer = Models(known, own, frozenset(row["normed"]))
        else:
            newer = Models(newer.known - gone, (newer.own | own) - gone, newer.normed - gone)
        yield version, newer
