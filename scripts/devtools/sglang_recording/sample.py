"""What of SGLang's recorded decisions is compared, and what a sample of them must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """What is compared of a row: names and classes, without texts."""
    kept = dict(row)
    for stage, names in (("arguments", ("runner", "a2a")), ("layer", ("runner", "method", "scheme"))):
        answer = row.get(stage)
        if answer is None:
            continue
        error = answer.get("error")
        if error is not None:
            kept[stage] = {"error": error["kind"] if isinstance(error, dict) else error}
        else:
            kept[stage] = {name: answer[name] for name in names}
    return kept


def traits(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """What occurs in a row: each part of the question with its answer."""
    answer = json.dumps([row["arguments"], row.get("layer")])
    yield ("checkpoint", row["checkpoint"], row["device"], answer)
    yield ("deployment", row["device"], json.dumps([row["a2a"], row["tp"], row["ep"]]), answer)
    yield ("forced", row["device"], str(row["forced"]), answer)
