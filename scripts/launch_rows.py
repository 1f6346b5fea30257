"""Rows of measured launches: those of surveys (`survey_launches`), and moectl's of benches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moectl.bench.bench_targets import DISPATCHED, named_shares
from moectl.bench.settings import BenchSettings
from moectl.environment.named_devices import find_device
from moectl.errors import UsageError
from moectl.files.safe_reading import unreadable
from moectl.files.strict_json import parse_json_object
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_plan import TILE_FAMILIES
from moectl.kernels.choice.surveyed_times import key_of
from moectl.kernels.choice.tile_family import launch_of
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.published_layers import SCHEMES

SETTLED_TOKENS = 1024
"""From so many tokens on, clocks had settled before each launch in all surveys; with fewer, where rows say
so."""

UNSETTLED = 1.25
"""How much slower than the fastest on settled clocks a launch has to be to count with a time from before the
clocks had settled: such times were up to a quarter too short."""


@dataclass(frozen=True)
class TimedLaunch:
    """A launch of a layer, or of a rank's share of it, and its microseconds on a GPU; whether its clocks had
    settled."""

    gpu: str
    name: str
    problem: MoEProblem
    tokens: int
    launch: Launch
    us: float
    settled: bool


def comparable(rows: Iterable[TimedLaunch]) -> list[TimedLaunch]:
    """The rows whose times can be compared: of two times of a launch in a cell the later.

    Where several launches of a cell were timed on settled clocks, others count that are slower by far
    (`UNSETTLED`).
    """
    cells: dict[Any, dict[Launch, TimedLaunch]] = defaultdict(dict)
    for row in rows:
        cells[find_device(row.gpu).name, key_of(row.problem), row.tokens][row.launch] = row
    kept = []
    for cell in cells.values():
        settled = [row.us for row in cell.values() if row.settled]
        least = UNSETTLED * min(settled) if len(settled) > 1 else 0.0
        kept += [row for row in cell.values() if row.settled or row.us > least]
    return kept


def timed_launches(path: Path) -> Iterator[TimedLaunch]:
    """The launches of a file that were timed and are still known; of a bench those whose results were right.

    UsageError for a file that cannot be read, and for lines that are no such rows.
    """
    gpu = ""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"rows {path}", path, error, "a file of rows") from error
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {path}"
        row = parse_json_object(line.encode(), where)
        gpu = row.get("device", gpu)  # of a bench, which a line at its beginning names
        try:
            made = _benched(row, gpu) if "kind" in row else _surveyed(row)
            if made is not None and (made.tokens < 1 or not 0 < made.us < math.inf):
                raise ValueError(f"{made.us} us at {made.tokens} tokens")
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{where} is no row of a survey or a bench: {type(error).__name__}, {error}",
                hint="give files of scripts/survey_launches, or of a bench with --json FILE.jsonl",
            ) from None
        if made is not None:
            yield made


def _surveyed(row: Mapping[str, Any]) -> TimedLaunch | None:
    launch, scheme = launch_of(TILE_FAMILIES, row["family"], row["tile"]), SCHEMES[row["format"]]
    if launch is None or "us" not in row:
        return None
    sizes = Dims(row["hidden"], row["intermediate"]), row["experts"], row["top_k"]
    problem = MoEProblem(*sizes, scheme, local_experts=row["local_experts"])
    tokens, settled = int(row["tokens"]), row.get("settled", row["tokens"] >= SETTLED_TOKENS)
    if not isinstance(settled, bool):
        raise TypeError(f"settled is {settled!r}")
    return TimedLaunch(row["gpu"], row["name"], problem, tokens, launch, float(row["us"]), settled)


def _benched(row: Mapping[str, Any], gpu: str) -> TimedLaunch | None:
    """A bench's row of a named layer or of a rank's share of it."""
    if row["kind"] != "row" or row["backend"] != "moectl" or row["routing"] != "uniform" or not row["ok"]:
        return None
    family, *words = row["tactic"].split()
    tile = {name: int(number) for name, number in (word.split("=") for word in words)}
    launch = launch_of(TILE_FAMILIES, family, tile)
    formats = [name for name, scheme in SCHEMES.items() if str(scheme) == row["scheme"]]
    if launch is None or not formats:
        return None
    problem = _share(f"{row['model']}:{formats[0]}", row["parallel"])
    name = row["model"] + (f" {row['parallel']}" if row["parallel"] != "1" else "")
    return TimedLaunch(gpu, name, problem, row["tokens"], launch, row["median_us"], True)


@cache
def _share(model: str, parallel: str) -> MoEProblem:
    """What a rank computes of a named layer; `parallel` is as in a bench row, such as ``ep8 dispatched``."""
    words = parallel.split()
    ranks = {word[:2]: int(word[2:]) for word in words if word[2:].isdecimal()}
    settings = BenchSettings(models=(model,), **ranks, dispatched=DISPATCHED in words)
    ((_, _, share),) = named_shares(settings)
    return share.problem
