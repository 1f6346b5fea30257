"""Clocks of an NVIDIA GPU while something runs on it, from an `nvidia-smi` that asks again and again."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import IO

MILLISECONDS = 200
"""Between two questions."""

FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "clocks_throttle_reasons.active",
)
"""The last one is spelled as drivers of every age know it."""

REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Why the driver holds clocks down, by bit (NVML's clocks event reasons). An idle GPU, and clocks that
somebody has set, are no reasons to distrust a time: they are seen in the clocks."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """One answer, or the worst of several: lowest clocks in MHz, highest temperature and power, every reason.

    0 is a number that the driver does not tell.
    """

    sm: int
    memory: int
    most_sm: int
    celsius: int
    watts: float
    reasons: tuple[str, ...] = ()


def parse_clocks(line: str) -> Clocks | None:
    """The clocks of one line of answers in the order of `FIELDS`; None for any other line."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(FIELDS):
        return None
    sm, memory, most, celsius, watts = map(_number, parts[:5])
    try:
        bits = int(parts[5], 16)
    except ValueError:
        bits = 0
    if not sm:
        return None
    said = tuple(reason for bit, reason in REASONS.items() if bits & bit)
    return Clocks(int(sm), int(memory), int(most), int(celsius), watts, said)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def worst(seen: Iterable[Clocks]) -> Clocks | None:
    """The worst of `seen`; None of nothing."""
    found = list(seen)
    if not found:
        return None
    reasons = tuple(dict.fromkeys(reason for one in found for reason in one.reasons))
    return Clocks(
        min(one.sm for one in found),
        min(one.memory for one in found),
        max(one.most_sm for one in found),
        max(one.celsius for one in found),
        max(one.watts for one in found),
        reasons,
    )


class ClockWatch:
    """Asks one GPU for its clocks while the block runs; `between` says what they were.

    Without `nvidia-smi`, or where it does not know the GPU, nothing is seen and `between` gives None.
    """

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self._seen: list[tuple[float, Clocks]] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> ClockWatch:
        if not self.gpu:
            return self
        query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen(
                ["nvidia-smi", "-i", self.gpu, *query, "-lms", str(MILLISECONDS)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except OSError:
            return self
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        return self

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            clocks = parse_clocks(line)
            if clocks is not None:
                self._seen.append((time.monotonic(), clocks))

    def between(self, begin: float, end: float) -> Clocks | None:
        """The worst clocks between two readings of the monotonic clock, or the nearest ones seen."""
        seen = list(self._seen)
        inside = worst(clocks for at, clocks in seen if begin <= at <= end)
        if inside is not None or not seen:
            return inside
        middle = (begin + end) / 2
        return min(seen, key=lambda one: abs(one[0] - middle))[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        if self._reader is not None:
            self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
