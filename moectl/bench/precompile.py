"""Compiles the kernels of a bench in advance, in several processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from ..errors import ExitCode, MoectlError, Unavailable
from ..layer.layer_source import LayerSource
from .bench_rows import CompileOutcome
from .settings import BenchSettings

JOB_CODE = "from moectl.bench.precompile import run_job; run_job()"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class CompileJob:
    """The part of a bench's layers, backends and token counts that one process compiles."""

    settings: BenchSettings
    source: LayerSource | None
    part: int
    parts: int


def compile_parts(
    settings: BenchSettings, source: LayerSource | None, processes: int
) -> Iterator[CompileOutcome]:
    """Runs every case of a bench once, distributed over `processes`; yields a process's lines when it exits.

    Compiled kernels stay in the caches of the libraries, such as TRITON_CACHE_DIR. A process that fails
    reports why; the kernels that it did not reach are compiled when they are measured.
    """
    jobs = [CompileJob(settings, source, part, processes) for part in range(processes)]
    running: list[tuple[CompileJob, subprocess.Popen[bytes], IO[str]]] = []
    try:
        for job in jobs:
            # One by one, so that the running ones are stopped if one cannot start.
            running.append((job, *_start(job)))
        while running:
            time.sleep(POLL_SECONDS)
            for item in [item for item in running if item[1].poll() is not None]:
                running.remove(item)
                job, process, log = item
                log.seek(0)
                yield from map(CompileOutcome, log.read().splitlines())
                log.close()
                if process.returncode:
                    text = f"part {job.part + 1} of {job.parts} failed with status {process.returncode}"
                    yield CompileOutcome(text, failed=True)
    finally:
        for _, process, log in running:
            process.kill()
            process.wait()
            log.close()


def _start(job: CompileJob) -> tuple[subprocess.Popen[bytes], IO[str]]:
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed above
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", JOB_CODE], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    except OSError as error:
        log.close()
        raise Unavailable(
            f"part {job.part + 1} of {job.parts} cannot be started: {error.strerror}",
            hint="compile with fewer --jobs",
        ) from error
    assert process.stdin is not None
    # A process that has already exited reads no input; its status and log say why.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(pickle.dumps(job))
    return process, log


def run_job() -> None:
    """Entry point of the processes of `compile_parts`: runs the `CompileJob` on stdin."""
    job: CompileJob = pickle.load(sys.stdin.buffer)
    from .open_bench import open_bench

    failed = False
    try:
        bench = open_bench(job.settings, job.source, measure_rates=False)
        for line in bench.compiled(job.part, job.parts):
            failed |= line.failed
            print(line.text, flush=True)
    except MoectlError as error:
        print("\n".join(part for part in (error.what, error.reason, error.hint) if part), flush=True)
        sys.exit(int(error.exit_code))
    if failed:
        sys.exit(int(ExitCode.FOUND))
