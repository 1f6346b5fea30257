"""The processes of `bench_peers`: workers that measure, by `moectl.bench`, and the one that watches them.

A kernel that fails can destroy its CUDA context, or hang. Its worker is then killed, the case that it was
measuring gets the reason, and a new worker continues after it. Workers report lines of JSON after `MARK`.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from own_environment import give_up

from moectl.bench.bench_rows import BenchRow, RowKey
from moectl.bench.bench_targets import RANDOM, named_shares
from moectl.bench.compile_units import case_name, reason_in
from moectl.bench.journal import RunHeader
from moectl.bench.precompile import BenchToCompile, compile_parts
from moectl.bench.settings import BenchSettings
from moectl.errors import ExitCode, MoectlError
from moectl.problem.roofline import MeasuredRates

MARK = "@bench "
NO_GPU = "it needs a CUDA GPU, and torch sees none"
NOT_REACHED = "not reached within the time limit"
LAST_LINES = 12
"""Lines of a worker's other output that are shown if it ends early."""


NOT_COMPILED = "its kernels were not compiled in time"


@dataclass(frozen=True)
class Part:
    """One bench, its rows before they are measured, and the keys of rows that are not wanted of it."""

    settings: BenchSettings
    rows: tuple[BenchRow, ...]
    left_out: frozenset[RowKey] = frozenset()

    @staticmethod
    def of(settings: BenchSettings, tokens: Mapping[str, Sequence[int]] | None = None) -> Part:
        """The part with all rows of `settings`, or those with the numbers of `tokens` by backend."""
        rows = [
            BenchRow(model, RANDOM, 0, str(share.whole.scheme), backend, count, routing, parallel)
            for model, parallel, share in named_shares(settings)
            for routing in settings.routings
            for count in settings.tokens
            for backend in settings.backends
        ]
        wanted = [row for row in rows if tokens is None or row.tokens in tokens[row.backend]]
        return Part(settings, tuple(wanted), frozenset(row.key for row in rows) - {row.key for row in wanted})


def merged_settings(parts: Sequence[Part]) -> BenchSettings:
    """Settings that name everything in `parts`, for the head of a file of their rows.

    Rows say how their layers are sharded: of ranks that differ, the head has one.
    """

    def every(name: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(item for part in parts for item in getattr(part.settings, name)))

    ranks = {name: {getattr(part.settings, name) for part in parts} for name in ("tp", "ep", "dispatched")}
    alike = {name: values.pop() for name, values in ranks.items() if len(values) == 1}
    return replace(
        parts[0].settings,
        **{"tp": 1, "ep": 1, "dispatched": False, **alike},
        models=every("models"),
        routings=every("routings"),
        backends=every("backends"),
        tokens=tuple(sorted(every("tokens"))),
    )


# --- in the worker


def work(order: Mapping[str, Any]) -> int:
    """Measures the benches of `order` except rows already done, and reports each; returns an exit status."""
    import torch

    if order["gpu"] and not torch.cuda.is_available():
        _send("fatal", why=NO_GPU)
        return 0
    from moectl.bench.open_bench import open_bench
    from moectl.bench.run_metadata import machine_metadata

    done = frozenset(map(tuple, order["done"]))
    rates = MeasuredRates(**order["rates"]) if order["rates"] else None

    def on_start(rows: Sequence[BenchRow]) -> None:
        _send("begin", keys=[row.key for row in rows])

    try:
        for number, data in enumerate(order["benches"]):
            settings = BenchSettings(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
            try:
                bench = open_bench(settings, None, rates=rates, on_start=on_start, costs=order["costs"])
            except MoectlError as error:
                _send("none", bench=number, why=error.what)
                continue
            rates = bench.rates
            _send("about", about=machine_metadata(bench.machine, settings, rates))
            for row in bench.measured(done):
                _send("row", row=row.to_json())
    except MoectlError as error:
        print("\n".join(text for text in (error.what, error.hint) if text), flush=True)
        return int(error.exit_code)
    return 0


def _send(kind: str, **data: Any) -> None:
    print(MARK + json.dumps({"kind": kind, **data}), flush=True)


# --- in the process that watches


@dataclass
class Watch:
    """Runs workers one after the other and collects their rows.

    Attributes:
        command: starts a worker, which reads its order from stdin.
        rates: rates of the roofline; None to measure them.
        end: time of the monotonic clock at which to stop.
        cell_limit: seconds without a message after which a worker is killed.
        costs: also measure what preparing weights costs, which takes longer.
        begin: called once with the conditions of the measurement, before the first row.
        report: called with every row as it arrives.
        about: the conditions of the measurement.
        rows: rows by key.
    """

    command: Sequence[str]
    parts: Sequence[Part]
    rates: MeasuredRates | None
    end: float
    cell_limit: float
    begin: Callable[[Mapping[str, Any]], None]
    report: Callable[[BenchRow], None]
    costs: bool = True
    about: dict[str, Any] = field(default_factory=dict)
    rows: dict[RowKey, BenchRow] = field(default_factory=dict)
    _begun: list[RowKey] = field(default_factory=list)
    _last_lines: list[str] = field(default_factory=list)

    def run(self) -> list[BenchRow]:
        """All rows in their order, each with a time or the reason why there is none.

        Rows already measured are kept at the time limit and on interrupts (including SIGTERM).
        """
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        pending = {row.key: row for part in self.parts for row in part.rows}
        try:
            reason = self._run_workers(pending)
        except KeyboardInterrupt:
            reason = "interrupted"
        self._give_up(pending, reason)
        return [self.rows[key] for key in pending]

    def _run_workers(self, pending: Mapping[RowKey, BenchRow]) -> str:
        """Runs workers one after the other; returns the reason for the rows that remain."""
        while pending.keys() - self.rows.keys() and time.monotonic() < self.end:
            before, self._begun = len(self.rows), []
            reason = self._run_worker()
            if not reason:
                return "its process reported no result"
            print("\n".join(self._last_lines), file=sys.stderr)
            if reason != BROKEN:
                self._give_up({key: pending[key] for key in self._begun if key in pending}, reason)
            if len(self.rows) == before:
                return reason
        return NOT_REACHED

    def _give_up(self, rows: Mapping[RowKey, BenchRow], reason: str) -> None:
        for key, row in rows.items():
            if key not in self.rows:
                self._add(replace(row, reason=reason))

    def _set_conditions(self, machine: Mapping[str, Any]) -> None:
        if not self.about:
            self.about = RunHeader(merged_settings(self.parts).to_json(), machine).to_json()
            self.begin(self.about)

    def _add(self, row: BenchRow) -> None:
        self._set_conditions({})
        self.rows[row.key] = row
        self.report(row)

    def _order(self) -> str:
        rates = self.about.get("rates") or (asdict(self.rates) if self.rates else None)
        benches = [asdict(part.settings) for part in self.parts]
        gpu = any(part.settings.device == "cuda" for part in self.parts)
        left_out = frozenset[RowKey]().union(*(part.left_out for part in self.parts))
        done = [*self.rows, *left_out]
        return json.dumps({"benches": benches, "rates": rates, "done": done, "gpu": gpu, "costs": self.costs})

    def _run_worker(self) -> str:
        """Runs one worker to its end; returns why it ended early, or an empty string."""
        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            process.stdin.write(self._order())
            process.stdin.close()
            while True:
                left = self.end - time.monotonic()
                try:
                    line = lines.get(timeout=max(0.0, min(self.cell_limit, left)))
                except queue.Empty:
                    return NOT_REACHED if left < self.cell_limit else f"no answer in {self.cell_limit:g} s"
                if line is None:
                    code = process.wait()
                    return _ENDS.get(code, f"its process ended with status {code}")
                self._handle(line)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _handle(self, line: str) -> None:
        if not line.startswith(MARK):
            self._last_lines = [*self._last_lines, line.rstrip()][-LAST_LINES:]
            return
        message = json.loads(line[len(MARK) :])
        if message["kind"] == "about":
            self._set_conditions(message["about"])
        elif message["kind"] == "fatal":
            give_up(message["why"], 3)
        elif message["kind"] == "begin":
            self._begun = [tuple(key) for key in message["keys"]]
        elif message["kind"] == "none":
            for row in self.parts[message["bench"]].rows:
                if row.key not in self.rows:
                    self._add(replace(row, reason=message["why"], refused=True))
        else:
            self._add(BenchRow.from_json(message["row"], "a row of a worker"))


BROKEN = "the GPU no longer responds in its process"
_ENDS = {0: "", int(ExitCode.UNAVAILABLE): BROKEN}


def _read(stream: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def compiled(parts: Sequence[Part], processes: int, seconds: float) -> tuple[bool, dict[str, str]]:
    """Compiles the kernels that `parts` run, in that many processes, and prints a line for each case.

    Returns whether everything went well; and by name of the cases that were reached (`case_name`) why their
    kernels are not there, empty if they are.
    """
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    failed = False
    reasons = {}
    benches = [BenchToCompile(part.settings, None, part.left_out) for part in parts]
    try:
        for line in compile_parts(benches, processes):
            failed |= line.failed
            print(line.text, flush=True)
            if (found := reason_in(line.text)) is not None:
                reasons[found[0]] = found[1]
    except TimeoutError:
        print(f"not everything was compiled after {seconds:.0f} s", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return not failed, reasons


def without_uncompiled(
    parts: Sequence[Part], reasons: Mapping[str, str]
) -> tuple[list[Part], list[BenchRow]]:
    """The parts without the rows whose kernels are not there, and these rows with the reason.

    Rows of backends that do not support their layer have nothing to compile, and stay.
    """
    kept, late = [], []
    for part in parts:
        why = {row.key: reasons.get(case_name(row), NOT_COMPILED) for row in part.rows}
        late += [replace(row, reason=why[row.key]) for row in part.rows if why[row.key]]
        rows = tuple(row for row in part.rows if not why[row.key])
        if rows:
            keys = frozenset(key for key, reason in why.items() if reason)
            kept.append(replace(part, rows=rows, left_out=part.left_out | keys))
    return kept, late


def _late(*_: object) -> None:
    raise TimeoutError
