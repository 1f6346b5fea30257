"""Clocks of an NVIDIA GPU during a measurement, sampled through NVML, or else by `nvidia-smi`."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from . import nvml

MILLISECONDS = 200
"""Sampling interval."""

FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "clocks_throttle_reasons.active",
)
"""Fields of nvidia-smi's query; the last one has the name that old and new drivers accept."""

REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Throttling reasons by bit (NVML's clocks event reasons). Idle and user-defined clocks are left out: they do
not make a time unreliable, and show in the clocks themselves."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """One sample, or the worst of several: lowest clocks in MHz, highest temperature and power, all reasons.

    0 stands for values that the driver does not report.
    """

    sm: int
    memory: int
    most_sm: int
    celsius: int
    watts: float
    reasons: tuple[str, ...] = ()


def parse_clocks(line: str) -> Clocks | None:
    """The clocks in one line of output, in the order of `FIELDS`; None for any other line.

    Example:
        >>> parse_clocks("1980, 2619, 1980, 41, 412.5, 0x0000000000000004")
        Clocks(sm=1980, memory=2619, most_sm=1980, celsius=41, watts=412.5, reasons=('power cap',))
    """
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
    return Clocks(int(sm), int(memory), int(most), int(celsius), watts, _reasons(bits))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def nvml_clocks(library: Any, board: Any) -> Clocks | None:
    """The clocks of the GPU with an NVML handle; None if the driver does not report them."""

    def ask(name: str, *arguments: Any) -> Any:
        return nvml.value_or(library, 0, getattr(library, name), board, *arguments)

    sm = ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM)
    if not sm:
        return None
    return Clocks(
        int(sm),
        int(ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM)),
        int(ask("nvmlDeviceGetMaxClockInfo", library.NVML_CLOCK_SM)),
        int(ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU)),
        ask("nvmlDeviceGetPowerUsage") / 1000,
        _reasons(int(ask("nvmlDeviceGetCurrentClocksThrottleReasons"))),
    )


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in REASONS.items() if bits & bit)


def worst(samples: Iterable[Clocks]) -> Clocks | None:
    """The worst value of each field over all samples; None without samples."""
    clocks = list(samples)
    if not clocks:
        return None
    reasons = tuple(dict.fromkeys(reason for sample in clocks for reason in sample.reasons))
    return Clocks(
        min(sample.sm for sample in clocks),
        min(sample.memory for sample in clocks),
        max(sample.most_sm for sample in clocks),
        max(sample.celsius for sample in clocks),
        max(sample.watts for sample in clocks),
        reasons,
    )


class ClockWatch:
    """Samples the clocks of one GPU while the block runs; `between` returns them for a time span.

    `gpu` is its UUID. Without NVML and `nvidia-smi`, or for a GPU unknown to the driver, there are no samples
    and `between` returns None.
    """

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self._samples: list[tuple[float, Clocks]] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._library = ExitStack()
        self._over = threading.Event()

    def __enter__(self) -> ClockWatch:
        if self.gpu and not self._start_nvml():
            self._start_process()
        return self

    def _start_nvml(self) -> bool:
        """Samples through NVML in a thread; False if it cannot be used for this GPU."""
        module = nvml.library()
        if module is None:
            return False
        try:
            library = self._library.enter_context(nvml.initialized())
            board = library and nvml.board_of(library, self.gpu)
        except module.NVMLError:
            self._library.close()
            return False
        if board is None:
            return False
        self._reader = threading.Thread(target=self._sample, args=(library, board), daemon=True)
        self._reader.start()
        return True

    def _sample(self, library: Any, board: Any) -> None:
        while True:
            clocks = nvml_clocks(library, board)
            if clocks is not None:
                self._samples.append((time.monotonic(), clocks))
            if self._over.wait(MILLISECONDS / 1000):
                return

    def _start_process(self) -> None:
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
            return
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            clocks = parse_clocks(line)
            if clocks is not None:
                self._samples.append((time.monotonic(), clocks))

    def between(self, begin: float, end: float) -> Clocks | None:
        """The worst clocks between two `time.monotonic` readings, else those nearest to the middle."""
        samples = list(self._samples)
        inside = worst(clocks for when, clocks in samples if begin <= when <= end)
        if inside is not None or not samples:
            return inside
        middle = (begin + end) / 2
        return min(samples, key=lambda sample: abs(sample[0] - middle))[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._library.close()
