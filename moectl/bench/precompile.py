"""Compiles the kernels of benches in advance, in several processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..errors import ExitCode, MoectlError, Unavailable, UsageError
from ..layer.layer_source import LayerSource
from .bench_rows import CompileOutcome, RowKey
from .settings import BenchSettings

JOB_CODE = "from moectl.bench.precompile import run_job; run_job()"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class BenchToCompile:
    """A bench whose rows, except those with keys in `done`, will be measured."""

    settings: BenchSettings
    source: LayerSource | None = None
    done: frozenset[RowKey] = frozenset()


@dataclass(frozen=True)
class CompileJob:
    """What a process of several does: of all units of work, those that no other has claimed.

    Attributes:
        number: the process, from 0.
        claims: a directory with a file for each claimed unit.
    """

    benches: Sequence[BenchToCompile]
    number: int
    claims: str


@dataclass
class _Process:
    """A started process and what it has printed so far, read by position: both use one open file."""

    number: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    _read: int = 0
    _line: bytes = field(default=b"")

    def lines(self) -> list[str]:
        """The lines printed since the last call; of a process that has ended, also an unfinished one."""
        ended = self.process.poll() is not None
        while chunk := os.pread(self.log.fileno(), 1 << 16, self._read):
            self._read += len(chunk)
            self._line += chunk
        *lines, self._line = self._line.split(b"\n")
        if ended and self._line:
            lines, self._line = [*lines, self._line], b""
        return [line.decode(errors="replace") for line in lines]


def compile_parts(benches: Sequence[BenchToCompile], processes: int) -> Iterator[CompileOutcome]:
    """Runs every case of `benches` once, distributed over `processes`; yields their lines as they come.

    Compiled kernels stay in the caches of the libraries, such as TRITON_CACHE_DIR. A process that fails
    reports why; the kernels that it did not reach are compiled when they are measured.
    """
    running: list[_Process] = []
    with tempfile.TemporaryDirectory(prefix="moectl-compile-") as claims:
        try:
            for number in range(processes):
                # One by one, so that the running ones are stopped if one cannot start.
                running.append(_start(CompileJob(benches, number, claims), processes))
            while running:
                time.sleep(POLL_SECONDS)
                for one in [*running]:
                    ended = one.process.poll()
                    yield from map(CompileOutcome, one.lines())
                    if ended is not None:
                        running.remove(one)
                        one.log.close()
                        if ended:
                            text = f"part {one.number + 1} of {processes} failed with status {ended}"
                            yield CompileOutcome(text, failed=True)
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()
                one.log.close()


def _start(job: CompileJob, processes: int) -> _Process:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `compile_parts`
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", JOB_CODE], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    except OSError as error:
        log.close()
        raise Unavailable(
            f"part {job.number + 1} of {processes} cannot be started: {error.strerror}",
            hint="compile with fewer --jobs",
        ) from error
    assert process.stdin is not None
    # A process that has already exited reads no input; its status and log say why.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(pickle.dumps(job))
    return _Process(job.number, process, log)


def run_job() -> None:
    """Entry point of the processes of `compile_parts`: runs the `CompileJob` on stdin."""
    job: CompileJob = pickle.load(sys.stdin.buffer)
    from .compile_units import compile_unit, compile_units, refused_cases, unopened_cases
    from .open_bench import open_bench

    failed = False
    error: MoectlError | None = None
    for number, wanted in enumerate(job.benches):
        try:
            bench = open_bench(wanted.settings, wanted.source, measure_rates=False)
        except MoectlError as refused:
            if _claimed(job.claims, f"{number}"):
                error = refused
                print("\n".join(filter(None, (error.what, error.reason, error.hint))), flush=True)
                if wanted.source is None:
                    with suppress(UsageError):  # `error` says it
                        for line in unopened_cases(wanted.settings):
                            print(line.text, flush=True)
            continue
        if _claimed(job.claims, f"{number}"):
            for line in refused_cases(bench):
                print(line.text, flush=True)
        for unit, part in enumerate(compile_units(bench, wanted.done)):
            if not _claimed(job.claims, f"{number}-{unit}"):
                continue
            for line in compile_unit(bench, part):
                failed |= line.failed
                print(line.text, flush=True)
    if error is not None:
        sys.exit(int(error.exit_code))
    if failed:
        sys.exit(int(ExitCode.FOUND))


def _claimed(claims: str, name: str) -> bool:
    """True in the first process that asks for `name`."""
    try:
        (Path(claims) / name).touch(exist_ok=False)
    except OSError:
        return False
    return True
