"""A small sample of recorded decisions in which everything occurs that occurs in all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any


def _bare(failure: dict[str, Any]) -> dict[str, Any]:
    return {"kind": failure["kind"]}


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """What is compared of a row."""
    kept = {name: value for name, value in row.items() if name not in ("warnings", "implementation")}
    if "error" in kept and isinstance(kept["error"], dict):
        kept["error"] = _bare(kept["error"])
    for phase in ("prefill", "decode"):
        if "error" in kept.get(phase, {}):
            kept[phase] = {"error": _bare(kept[phase]["error"])}
    return kept


def _traits(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """What occurs in a row."""
    if "loading" in row:
        yield ("loading", row["loading"])
        return
    answer = json.dumps([row.get(name) for name in ("error", "quantizer", "prefill", "decode")])
    arguments = json.dumps(row["arguments"])
    packages = json.dumps([row["packages"], row["env"]])
    yield ("checkpoint", row["checkpoint"], answer)
    yield ("device", row["device"], answer)
    yield ("arguments", arguments, answer)
    yield ("packages", packages, answer)


def sampled(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, shortened, that have something which no row before has."""
    seen: set[tuple[str, ...]] = set()
    for row in map(shortened, rows):
        found = set(_traits(row))
        if found - seen:
            seen |= found
            yield row
