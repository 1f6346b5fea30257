"""The processes of `bench_peers`: one that times unit after unit, and the one that watches it.

A kernel that fails can take its CUDA context along, or never come back: then its process is ended, and
another goes on with the next unit. What a worker finds comes line by line, as JSON behind `MARK`.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from typing import Any

from own_environment import give_up

from moectl.environment.peers import VARIABLE

MARK = "@row "
COLD_SETS, LARGE_SETS, LARGE = 16, 4, 64
"""Routings in a graph, those above `LARGE` tokens."""
REPLAYS = 20
CHECKED_TOKENS = 4
PEER_ERROR = 0.02
"""Relative RMS error up to which a peer computes the same layer."""
WARM_TOKENS = 4
"""Numbers of tokens that one process compiles for."""
KEPT = 64
"""Cells whose inputs and expected results are kept for the next column of the same layer."""


@dataclass(frozen=True)
class Unit:
    """A column on one layer: what is built once, and at which routings and tokens it is timed."""

    model: str
    format: str
    column: str
    cells: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Row:
    """One cell: `us` and `floor_us` are microseconds of a layer, `us` None where there is no time.

    Attributes:
        experts: how many are touched, the mean of the routings.
        checked: ``ok``, ``WRONG``, or empty where there is no time.
        error: relative L2 error of the checked tokens.
        note: why there is no time, or what has to be known about it.
    """

    model: str
    format: str
    routing: str
    column: str
    tokens: int
    us: float | None = None
    spread_us: float = 0.0
    floor_us: float = 0.0
    bound: str = ""
    experts: float = 0.0
    checked: str = ""
    error: float | None = None
    note: str = ""


def _cells(unit: Unit) -> list[Row]:
    return [Row(unit.model, unit.format, routing, unit.column, tokens) for routing, tokens in unit.cells]


# --- in the worker


def work(order: dict[str, Any]) -> int:
    """Times, or only runs, the units of `order` and prints what is found."""
    import torch

    if not torch.cuda.is_available():
        _say("fatal", {"why": "it needs a CUDA GPU, and torch sees none"})
        return 1
    from moe_peers import Absent, Column

    from moectl.floors import Rates
    from moectl.models import FORMATS, MODELS
    from moectl.random_layer import RandomLayer

    device = torch.device("cuda")
    rates = _rates(order["rates"], device) if not order["warm"] else Rates(1.0, 1.0, "")
    _say("about", _about(device, rates))
    if order["peers"]:
        os.environ[VARIABLE] = order["peers"]
    for given in order["units"]:
        unit = Unit(**{**given, "cells": tuple((routing, tokens) for routing, tokens in given["cells"])})
        _say("unit", {})
        problem = MODELS[unit.model]
        problem = _with_weight(problem, FORMATS[unit.format])
        start = time.monotonic()
        try:
            layer = RandomLayer(problem, device)
            column = Column(unit.column, layer)
        except Absent as absent:
            _say("none", {"why": f"absent: {absent}"})
            continue
        except Exception as error:  # a library of others may raise anything; it is printed in full
            traceback.print_exc()
            _say("none", {"why": _short(error)})
            torch.cuda.synchronize()  # an error that stays ends this process here
            continue
        torch.cuda.synchronize()
        _say("built", {"seconds": time.monotonic() - start})
        for row in _cells(unit):
            try:
                _say("row", _measured(row, layer, column, rates, order["warm"]))
            except Exception as error:
                traceback.print_exc()
                _say("row", asdict(row) | {"note": _short(error)})
                torch.cuda.synchronize()
        del column, layer
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def _with_weight(problem: Any, weight: Any) -> Any:
    return replace(problem, scheme=replace(problem.scheme, weight=weight))


def _measured(row: Row, layer: Any, column: Any, rates: Any, warm: bool) -> dict[str, Any]:
    import torch
    from moe_cells import mean_floor

    from moectl.kernels.timing import time_calls

    problem, device = layer.problem, layer.device
    count = 1 if warm else COLD_SETS if row.tokens <= LARGE else LARGE_SETS
    x, sets = _inputs(problem, device, row.routing, row.tokens, count)
    with torch.inference_mode():
        y = column(x, sets[0])
        torch.cuda.synchronize()
        if warm:
            return asdict(row)
        checked, error = _checked(y, row, layer, column)
        timing = time_calls([lambda s=s: column(x, s) for s in sets], device, repeats=REPLAYS)
    floor = mean_floor(problem, sets, rates)
    touched = sum(torch.unique(s.ids).numel() for s in sets) / len(sets)
    found = {
        "us": timing.median_us,
        "spread_us": timing.spread_us,
        "floor_us": 1e6 * floor.seconds,
        "bound": floor.bound,
        "experts": touched,
        "checked": checked,
        "error": error,
        "note": column.note,
    }
    return asdict(row) | found


@lru_cache(maxsize=KEPT)
def _inputs(problem: Any, device: Any, routing: str, tokens: int, count: int) -> tuple[Any, list[Any]]:
    """Tokens and `count` routings of a cell."""
    from moectl.random_layer import routings, tokens_of

    return tokens_of(problem, tokens, device), routings(problem, tokens, routing, count, device)


@lru_cache(maxsize=KEPT)
def _expected(layer: Any, routing: str, tokens: int, activation: Any) -> tuple[list[int], Any]:
    """Some tokens of a cell, and what the reference gives for them under its first routing."""
    x, (routed,) = _inputs(layer.problem, layer.device, routing, tokens, 1)
    rows = sorted({round(i * (tokens - 1) / (CHECKED_TOKENS - 1)) for i in range(CHECKED_TOKENS)})
    return rows, layer.reference(x, routed, rows, activation)


def _checked(y: Any, row: Row, layer: Any, column: Any) -> tuple[str, float]:
    from moectl.kernels.tolerance import Tolerance, check, tolerance_for

    rows, expected = _expected(layer, row.routing, row.tokens, column.numerics)
    # Another library rounds where it likes: it is only to compute the same layer.
    tolerance = tolerance_for(layer.problem) if column.ours else Tolerance(1.0, PEER_ERROR, "the same layer")
    result = check(y[rows], expected, tolerance)
    return "ok" if result.ok else "WRONG", result.rms


def _rates(text: str, device: Any) -> Any:
    from moectl.floors import Rates
    from moectl.kernels.timing import measured_rates

    if text == "measured":
        return measured_rates(device)
    bandwidth, flops = map(float, text.split(","))
    return Rates(bandwidth * 1e12, flops * 1e12, "given")


def _about(device: Any, rates: Any) -> dict[str, Any]:
    import torch
    import triton

    import moectl

    found = {}
    for name in ("vllm", "triton_kernels", "humming-kernels"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name(device),
        "versions": {"moectl": moectl.__version__, "torch": torch.__version__, "triton": triton.__version__}
        | found,
        "bandwidth": rates.bandwidth,
        "flops": rates.flops,
        "rates": rates.source,
        "l2": "cold: flushed before each replay, 16 routings in a graph, 4 above 64 tokens",
    }


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def _say(kind: str, data: dict[str, Any]) -> None:
    print(MARK + json.dumps({"kind": kind, **data}), flush=True)


# --- in the process that watches


def _order(units: Sequence[Unit], options: dict[str, Any], warm: bool) -> list[str]:
    return ["--work", json.dumps({"units": [asdict(u) for u in units], "warm": warm, **options})]


@dataclass
class _Progress:
    """Rows so far, and where the worker is: the unit at hand and its cells still to come."""

    rows: list[Row] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    left: list[Unit] = field(default_factory=list)
    pending: list[Row] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def take(self, line: str, report: Callable[[Row], None]) -> None:
        if not line.startswith(MARK):
            self.said = [*self.said[-20:], line.rstrip()]
            return
        data = json.loads(line[len(MARK) :])
        kind = data.pop("kind")
        if kind == "fatal":
            give_up(data["why"], 3)
        if kind == "about":
            self.about = self.about or data
        elif kind == "unit":
            self.pending = _cells(self.left.pop(0))
        elif kind == "built":
            print(f"  built in {data['seconds']:.1f} s", flush=True)
        elif kind == "none":
            self.give_up(data["why"], report)
        else:
            self.pending.pop(0)
            self.rows.append(Row(**data))
            report(self.rows[-1])

    def give_up(self, why: str, report: Callable[[Row], None]) -> None:
        """The pending cells get no time; the first of them is reported."""
        given_up = [replace(row, note=why) for row in self.pending]
        self.rows += given_up
        for row in given_up[:1]:
            report(row)
        self.pending = []


def run_units(
    command: list[str],
    units: Sequence[Unit],
    options: dict[str, Any],
    end: float,
    cell_limit: float,
    report: Callable[[Row], None],
) -> tuple[dict[str, Any], list[Row]]:
    """What the rows were taken on, and the rows of `units`, reported as they come.

    At `end`, a reading of the monotonic clock, or when it is interrupted, the cells left get no time.
    """
    progress = _Progress(left=list(units))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _work_through(command, progress, options, end, cell_limit, report)
        why = "not reached within the time limit"
    except KeyboardInterrupt:
        why = "interrupted"
    progress.give_up(why, report)
    for unit in progress.left:
        progress.pending = _cells(unit)
        progress.give_up(why, report)
    return progress.about, progress.rows


def _work_through(
    command: list[str],
    progress: _Progress,
    options: dict[str, Any],
    end: float,
    cell_limit: float,
    report: Callable[[Row], None],
) -> None:
    """Workers one after the other, until no unit is left or the time is up."""
    while progress.left and time.monotonic() < end:
        before = len(progress.left)
        why = _watch([*command, *_order(progress.left, options, False)], progress, end, cell_limit, report)
        if why:
            print("\n".join(progress.said), file=sys.stderr)
            progress.give_up(why, report)
        if len(progress.left) == before:
            progress.pending = _cells(progress.left.pop(0))
            progress.give_up(why or "the process said nothing about it", report)


def _watch(
    command: list[str], progress: _Progress, end: float, cell_limit: float, report: Callable[[Row], None]
) -> str:
    """Runs one worker to its end; why it ended too early, or nothing."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None

    def read(stream: Any) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    try:
        while True:
            left = end - time.monotonic()
            try:
                line = lines.get(timeout=max(0.0, min(cell_limit, left)))
            except queue.Empty:
                return "the time limit was reached" if left < cell_limit else f"no answer in {cell_limit:g} s"
            if line is None:
                code = process.wait()
                return f"its process ended with status {code}" if code else ""
            progress.take(line, report)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def warm_units(
    command: list[str], units: Sequence[Unit], options: dict[str, Any], at_once: int, end: float
) -> int:
    """Runs every cell once, `at_once` processes at a time, so that their kernels are compiled and kept."""
    waiting, running = [part for unit in units for part in _parts(unit)], []
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < at_once:
            unit = waiting.pop(0)
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when its process has ended
            process = subprocess.Popen([*command, *_order([unit], options, True)], stdout=log, stderr=log)
            running.append((unit, process, log, time.monotonic()))
        time.sleep(0.1)
        for item in [item for item in running if item[1].poll() is not None]:
            running.remove(item)
            _tell_warm(*item)
    for unit, process, _, _ in running:
        process.kill()
        process.wait()
        print(f"{_name(unit)}: not ready in time", flush=True)
    return 0


def _parts(unit: Unit) -> list[Unit]:
    """`unit` in parts of a few cells, as numbers of tokens, not routings, choose kernels."""
    cells = tuple({tokens: (routing, tokens) for routing, tokens in reversed(unit.cells)}.values())[::-1]
    every = -(-len(cells) // WARM_TOKENS)
    return [replace(unit, cells=cells[first::every]) for first in range(every)]


def _name(unit: Unit) -> str:
    return f"{unit.model} {unit.format} {unit.column} M={','.join(str(tokens) for _, tokens in unit.cells)}"


def _tell_warm(unit: Unit, process: Any, log: Any, start: float) -> None:
    log.seek(0)
    text = log.read()
    log.close()
    said = [json.loads(line[len(MARK) :]) for line in text.splitlines() if line.startswith(MARK)]
    if why := next((entry["why"] for entry in said if entry["kind"] == "fatal"), ""):
        give_up(why, 3)
    notes = {entry.get("why") or entry.get("note") for entry in said} - {None, ""}
    taken = f"{time.monotonic() - start:.0f} s, status {process.returncode}"
    print(f"{_name(unit)}: {taken} {'; '.join(sorted(notes))}", flush=True)
