"""The processes of `bench_peers`: one that measures, by `moectl.bench`, and the one that watches it.

A kernel that fails can take its CUDA context along, or never come back: then its process is ended, what it
was at gets the reason, and another goes on behind. What a worker finds comes line by line, as JSON behind
`MARK`.
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
from moectl.bench.journal import RunHeader
from moectl.bench.precompile import compile_parts
from moectl.bench.settings import BenchSettings
from moectl.errors import ExitCode, MoectlError
from moectl.problem.roofline import DeviceRates

MARK = "@bench "
NO_GPU = "it needs a CUDA GPU, and torch sees none"
NOT_REACHED = "not reached within the time limit"
LAST_LINES = 12
"""Lines of a worker's own output that are shown when it ends early."""


@dataclass(frozen=True)
class Part:
    """One bench, and all rows that it is to give, as they are before anything is known of them."""

    settings: BenchSettings
    rows: tuple[BenchRow, ...]


def whole(parts: Sequence[Part]) -> BenchSettings:
    """All that `parts` have in one: every routing, every number of tokens."""
    routings = dict.fromkeys(name for part in parts for name in part.settings.routings)
    tokens = sorted({count for part in parts for count in part.settings.tokens})
    return replace(parts[0].settings, routings=tuple(routings), tokens=tuple(tokens))


# --- in the worker


def work(order: Mapping[str, Any]) -> int:
    """Measures the benches of `order` but for what is done, and says what is found; an exit status."""
    import torch

    if order["gpu"] and not torch.cuda.is_available():
        _say("fatal", why=NO_GPU)
        return 0
    from moectl.bench.open_bench import open_bench
    from moectl.bench.run_metadata import machine_metadata

    done = frozenset(map(tuple, order["done"]))
    rates = DeviceRates(**order["rates"]) if order["rates"] else None

    def on_start(rows: Sequence[BenchRow]) -> None:
        _say("begin", keys=[row.key for row in rows])

    try:
        for number, data in enumerate(order["benches"]):
            settings = BenchSettings(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
            try:
                bench = open_bench(settings, None, rates=rates, on_start=on_start)
            except MoectlError as error:
                _say("none", bench=number, why=error.what)
                continue
            rates = bench.rates
            _say("about", about=machine_metadata(bench.machine, settings, rates))
            for row in bench.measured(done):
                _say("row", row=row.to_json())
    except MoectlError as error:
        print("\n".join(text for text in (error.what, error.hint) if text), flush=True)
        return int(error.exit_code)
    return 0


def _say(kind: str, **data: Any) -> None:
    print(MARK + json.dumps({"kind": kind, **data}), flush=True)


# --- in the process that watches


@dataclass
class Watch:
    """What workers have found so far.

    Attributes:
        command: starts a worker, which reads its order from stdin.
        rates: of the floor; None to measure them.
        end: a reading of the monotonic clock at which it stops.
        cell_limit: seconds in which a worker has to say something.
        begin: told once what the rows are taken on, before the first.
        report: told every row as it comes.
        about: what the rows were taken on.
        rows: by their keys.
    """

    command: Sequence[str]
    parts: Sequence[Part]
    rates: DeviceRates | None
    end: float
    cell_limit: float
    begin: Callable[[Mapping[str, Any]], None]
    report: Callable[[BenchRow], None]
    about: dict[str, Any] = field(default_factory=dict)
    rows: dict[RowKey, BenchRow] = field(default_factory=dict)
    _begun: list[RowKey] = field(default_factory=list)
    _said: list[str] = field(default_factory=list)

    def run(self) -> list[BenchRow]:
        """All rows in their order: a time, or the reason why there is none.

        When time is up, or it is interrupted (SIGTERM too), what was measured is kept.
        """
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        wanted = {row.key: row for part in self.parts for row in part.rows}
        try:
            why = self._work_through(wanted)
        except KeyboardInterrupt:
            why = "interrupted"
        self._give_up(wanted, why)
        return [self.rows[key] for key in wanted]

    def _work_through(self, wanted: Mapping[RowKey, BenchRow]) -> str:
        """Workers one after the other; why what is left then is left."""
        while wanted.keys() - self.rows.keys() and time.monotonic() < self.end:
            before, self._begun = len(self.rows), []
            why = self._worker()
            if not why:
                return "its process said nothing about it"
            print("\n".join(self._said), file=sys.stderr)
            if why != BROKEN:
                self._give_up({key: wanted[key] for key in self._begun if key in wanted}, why)
            if len(self.rows) == before:
                return why
        return NOT_REACHED

    def _give_up(self, rows: Mapping[RowKey, BenchRow], why: str) -> None:
        for key, row in rows.items():
            if key not in self.rows:
                self._add(replace(row, reason=why))

    def _known(self, machine: Mapping[str, Any]) -> None:
        if not self.about:
            self.about = RunHeader(whole(self.parts).to_json(), machine).to_json()
            self.begin(self.about)

    def _add(self, row: BenchRow) -> None:
        self._known({})
        self.rows[row.key] = row
        self.report(row)

    def _order(self) -> str:
        rates = self.about.get("rates") or (asdict(self.rates) if self.rates else None)
        benches = [asdict(part.settings) for part in self.parts]
        gpu = any(part.settings.device == "cuda" for part in self.parts)
        return json.dumps({"benches": benches, "rates": rates, "done": list(self.rows), "gpu": gpu})

    def _worker(self) -> str:
        """Runs one worker to its end; why it ended too early, or nothing."""
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
                self._take(line)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _take(self, line: str) -> None:
        if not line.startswith(MARK):
            self._said = [*self._said, line.rstrip()][-LAST_LINES:]
            return
        found = json.loads(line[len(MARK) :])
        if found["kind"] == "about":
            self._known(found["about"])
        elif found["kind"] == "fatal":
            give_up(found["why"], 3)
        elif found["kind"] == "begin":
            self._begun = [tuple(key) for key in found["keys"]]
        elif found["kind"] == "none":
            for row in self.parts[found["bench"]].rows:
                if row.key not in self.rows:
                    self._add(replace(row, reason=found["why"], refused=True))
        else:
            self._add(BenchRow.from_json(found["row"], "a row of a worker"))


BROKEN = "the GPU answers its process no more"
_ENDS = {0: "", int(ExitCode.UNAVAILABLE): BROKEN}


def _read(stream: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def compiled(parts: Sequence[Part], processes: int, seconds: float) -> int:
    """Compiles what `parts` would run, in so many processes at once, and says what; 1 when something failed.

    What is not ready after so many seconds is compiled later, when it is measured.
    """
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    failed = False
    try:
        for line in compile_parts(whole(parts), None, processes):
            failed |= line.failed
            print(line.text, flush=True)
    except TimeoutError:
        print(f"not all was ready after {seconds:.0f} s", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return int(failed)


def _late(*_: object) -> None:
    raise TimeoutError
