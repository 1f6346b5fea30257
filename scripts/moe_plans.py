"""Plans of `bench_peers`: layers, each with backends and the numbers of tokens that they are timed at.

A plan is a JSON file: ``about`` is a sentence, ``layers`` a list in the order of measurement. A layer has a
``model`` as `moectl bench --model` takes it, optionally ``tp``, ``ep`` and ``dispatched``, and ``tokens``,
which maps columns to numbers of tokens such as ``1-4096*4,8192``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_tables import COLUMNS
from moe_workers import Part

from moectl.bench.settings import BenchSettings, parse_counts
from moectl.errors import UsageError
from moectl.files.safe_reading import unreadable
from moectl.files.strict_json import parse_json_object

LARGEST_PLAN = 1 << 20
KEYS = {"model": str, "tp": int, "ep": int, "dispatched": bool, "tokens": dict}


def planned(path: Path, columns: Collection[str], settings: BenchSettings) -> list[Part]:
    """The benches of the plan at `path`, one for each layer, with `columns` alone.

    Everything else is as in `settings`. Layers without any of the columns are left out. Raises UsageError for
    a file that is no plan, or has unknown models, formats, columns or numbers of tokens.
    """
    try:
        if path.stat().st_size > LARGEST_PLAN:
            raise UsageError(f"{path} has more than {LARGEST_PLAN} bytes: that is no plan")
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(f"plan {path}", path, error, "a JSON file") from error
    layers = parse_json_object(data, f"plan {path}").get("layers")
    if not isinstance(layers, list) or not layers:
        raise UsageError(f"{path} is no plan: it has no list of layers")
    parts = [_part(layer, f"layer {at} of {path}", columns, settings) for at, layer in enumerate(layers, 1)]
    found = [part for part in parts if part is not None]
    if not found:
        raise UsageError(f"{path} has none of the columns {', '.join(columns)}")
    return found


def _part(layer: Any, where: str, columns: Collection[str], settings: BenchSettings) -> Part | None:
    tokens = _tokens(layer, where)
    chosen = {column: tokens[column] for column in tokens if column in columns}
    if not chosen:
        return None
    shared = {name: layer[name] for name in ("tp", "ep", "dispatched") if name in layer}
    return Part.of(
        _settings(settings, layer["model"], chosen, shared),
        {COLUMNS[column]: counts for column, counts in chosen.items()},
    )


def _settings(
    settings: BenchSettings, model: str, tokens: Mapping[str, tuple[int, ...]], shared: Mapping[str, Any]
) -> BenchSettings:
    every = sorted({count for counts in tokens.values() for count in counts})
    backends = tuple(COLUMNS[column] for column in tokens)
    return replace(settings, models=(model,), tokens=tuple(every), backends=backends, **shared)


def _tokens(layer: Any, where: str) -> dict[str, tuple[int, ...]]:
    """The numbers of tokens by column of a plan's layer, whose keys are checked."""
    if not isinstance(layer, dict) or not {"model", "tokens"} <= layer.keys():
        raise UsageError(f"{where} must be an object with model and tokens, got {json.dumps(layer)[:80]}")
    for name, value in layer.items():
        kind = KEYS.get(name)
        if kind is None or type(value) is not kind:
            wanted = f"a {kind.__name__}" if kind else f"one of {', '.join(KEYS)}"
            raise UsageError(f"{name} in {where} must be {wanted}, got {json.dumps(value)[:80]}")
    for column, counts in layer["tokens"].items():
        if column not in COLUMNS:
            raise UsageError(f"no column is called {column!r} in {where}; choose from {', '.join(COLUMNS)}")
        if not isinstance(counts, str):
            raise UsageError(f"tokens of {column} in {where} must be a string such as 1,8,64-1024*4")
    return {column: parse_counts(counts) for column, counts in layer["tokens"].items()}
