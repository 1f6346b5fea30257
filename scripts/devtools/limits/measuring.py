"""Runs a program and measures it: seconds, processor seconds, peak memory; kills one that goes too far."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.02
"""Seconds between two looks at the memory of a running program."""


@dataclass(frozen=True)
class Measured:
    """How a program ended: its exit status (negative: the signal that ended it), cost and printed text.

    `seconds` are of the clock, without those in which the program was ready and other programs had the
    processors; `busy` are of the processors; `megabytes` are the peak resident memory of the
    program alone. `stopped` says why it was killed, empty if it ended by itself.
    """

    status: int
    seconds: float
    busy: float
    megabytes: float
    stderr: str
    stopped: str = ""


def measured(
    words: Sequence[str], env: Mapping[str, str], *, most_seconds: float, most_megabytes: float
) -> Measured:
    """Runs `words`, which are killed once they exceed a bound; the bounds keep the machine alive."""
    begin = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=dict(env)
        )
        stopped, peak, queued = "", 0.0, 0.0
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            peak = max(peak, _peak_megabytes(process.pid))
            queued = max(queued, _queued_seconds(process.pid))
            passed = time.monotonic() - begin - queued
            if not stopped and (passed > most_seconds or peak > most_megabytes):
                stopped = f"{passed:.0f} s" if passed > most_seconds else f"{peak:.0f} MB"
                process.kill()
            time.sleep(INTERVAL)
        seconds = time.monotonic() - begin - queued
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        usage = ended[2]
        said.seek(0)
        text = said.read(1 << 20).decode("utf-8", "replace")
    return Measured(process.returncode, seconds, usage.ru_utime + usage.ru_stime, peak, text, stopped)


def _peak_megabytes(pid: int) -> float:
    """The process's own peak: what the system reports of an ended child counts its parent's memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next(
        (int(line.split()[1]) / 1000 for line in status.splitlines() if line.startswith("VmHWM:")), 0.0
    )


def _queued_seconds(pid: int) -> float:
    """How long the process's main thread has waited for a processor."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
