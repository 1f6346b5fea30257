"""Clocks of a GPU, from stand-ins for the driver's library and for `nvidia-smi`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from moectl.environment import nvml
from moectl.environment.gpu_clocks import Clocks, ClockWatch, nvml_clocks, parse_clocks, worst

HELD = ("power cap", "software thermal slowdown")


@pytest.mark.parametrize(
    ("line", "clocks"),
    [
        ("1980, 3201, 1980, 45, 300.50, 0x0000000000000000\n", Clocks(1980, 3201, 1980, 45, 300.5)),
        ("1410, 3201, 1980, 80, 700.1, 0x0000000000000024", Clocks(1410, 3201, 1980, 80, 700.1, HELD)),
        ("345, 3201, 1980, 30, [N/A], 0x0000000000000001", Clocks(345, 3201, 1980, 30, 0.0)),
        ("1980, 3201, 1980, 45, 300, Active", Clocks(1980, 3201, 1980, 45, 300.0)),
        ("[N/A], 3201, 1980, 45, 300, 0x0", None),
        ("Unable to determine the device handle", None),
        ("", None),
    ],
)  # fmt: skip
def test_lines(line: str, clocks: Clocks | None) -> None:
    assert parse_clocks(line) == clocks


def test_the_worst_of_several() -> None:
    seen = [Clocks(1980, 3201, 1980, 40, 200, ("a",)), Clocks(1500, 2000, 1980, 70, 600, ("b", "a"))]
    assert worst(seen) == Clocks(1500, 2000, 1980, 70, 600, ("a", "b"))
    assert worst([]) is None


def test_clocks_are_those_of_the_time_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\n[ "$2" = GPU-1 ] || exit 6\n'
        'for mhz in 1980 1500 1900; do echo "$mhz, 3201, 1980, 45, 300, 0x4"; sleep 0.3; done\nsleep 60\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with ClockWatch("GPU-1") as watch:
        end = time.monotonic() + 20
        while len(watch._samples) < 3 and time.monotonic() < end:
            time.sleep(0.02)
        times = [at for at, _ in watch._samples]
        assert len(times) == 3
        everything = watch.between(times[0], times[2])
        assert everything is not None and (everything.sm, everything.reasons) == (1500, ("power cap",))
        first = watch.between(times[0] - 1, times[0])
        assert first is not None and first.sm == 1980
        later = watch.between(times[2] + 5, times[2] + 6)
        assert later is not None and later.sm == 1900
    with ClockWatch("GPU-2") as watch:
        time.sleep(0.2)
        assert watch.between(0, time.monotonic()) is None


def test_without_a_gpu_or_a_driver_nothing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for gpu in ("", "GPU-1"):
        with ClockWatch(gpu) as watch:
            assert watch.between(0, 1e9) is None


THROTTLED = {
    "uuid": "GPU-1",
    "sm": 1410,
    "clock": 3201,
    "most": 1980,
    "celsius": 80,
    "milliwatts": 700100,
    "reasons": 0x24,
    "slices": ({"uuid": "MIG-1"},),
}


@pytest.mark.parametrize("gpu", ["GPU-1", "MIG-1"])
def test_clocks_of_the_library_need_no_process(bench, gpu: str) -> None:
    bench.nvml(THROTTLED)
    bench.failing_gpus("not asked")
    with ClockWatch(gpu) as watch:
        end = time.monotonic() + 20
        while len(watch._samples) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert watch._process is None
        assert watch.between(0, time.monotonic()) == Clocks(1410, 3201, 1980, 80, 700.1, HELD)
    begin, samples = time.monotonic(), len(watch._samples)
    assert samples >= 2 and watch._reader is not None and not watch._reader.is_alive()
    assert watch.between(begin + 5, begin + 6) is not None


def test_a_gpu_unknown_to_the_library_is_left_to_the_process(bench) -> None:
    bench.nvml(THROTTLED)
    bench.file("nvidia-smi", "#!/bin/sh\necho '1980, 3201, 1980, 45, 300, 0x4'\n", program=True)
    with ClockWatch("GPU-7") as watch:
        end = time.monotonic() + 20
        while not watch._samples and time.monotonic() < end:
            time.sleep(0.02)
        assert watch.between(0, time.monotonic()) == Clocks(1980, 3201, 1980, 45, 300.0, HELD[:1])


def test_values_that_the_driver_does_not_report_are_zero(bench) -> None:
    bench.nvml({"uuid": "GPU-1", "sm": 1500}, {"uuid": "GPU-2"})
    library = nvml.library()
    assert nvml_clocks(library, nvml.board_of(library, "GPU-1")) == Clocks(1500, 0, 0, 0, 0.0)
    assert nvml_clocks(library, nvml.board_of(library, "GPU-2")) is None
