"""What of recorded decisions of transformers is compared, and what a sample of them must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


def traits(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
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
