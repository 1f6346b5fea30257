"""Sources, plans and conversions that the tests share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moectl.checkpoint import open_checkpoint, read_header
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
from moectl.convert.plan.conversion_plan import ConversionPlan
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from support.stream_checkpoints import CHECKPOINTS, folder_bytes

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("driver.py")
Drive = Callable[..., tuple[int, dict[str, Any]]]
"""Converts in another process; see `drive`."""

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(params=sorted(CHECKPOINTS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Each kind of checkpoint in turn."""
    return CHECKPOINTS[request.param](tmp_path / "source")


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    return CHECKPOINTS["gpt_oss"](tmp_path / "source")


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    return CHECKPOINTS["kimi"](tmp_path / "source")


def plan_of(source: Path, target: str = "marlin", **options: Any) -> ConversionPlan:
    """The plan to convert a folder to a target."""
    checkpoint = open_checkpoint(source)
    layout = layout_for(target, checkpoint.groups[0].problem.scheme.weight, None)
    return plan_conversion(checkpoint, layout, **options)


@pytest.fixture
def converted(gpt_oss: Path, tmp_path: Path) -> Path:
    """A gpt-oss checkpoint converted for Marlin."""
    out = tmp_path / "out"
    convert(plan_of(gpt_oss), out)
    return out


@pytest.fixture(scope="session")
def driver() -> Iterator[subprocess.Popen[str]]:
    """A driver that converts in forks of itself: what the imports take, it takes once."""
    with subprocess.Popen(
        [sys.executable, str(DRIVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def drive(driver: subprocess.Popen[str]) -> Drive:
    """Runs a conversion in a fork; the exit status, and what it printed (nothing when it was killed)."""
    assert driver.stdin is not None and driver.stdout is not None
    asked, answers = driver.stdin, driver.stdout

    def run(**options: Any) -> tuple[int, dict[str, Any]]:
        asked.write(json.dumps(options, default=str) + "\n")
        asked.flush()
        outcome: dict[str, Any] = {}
        for line in answers:
            answer = json.loads(line)
            if "status" in answer:
                assert outcome or answer["status"] < 0, "the driver's error is on stderr"
                return answer["status"], outcome
            outcome = answer
        raise AssertionError("the driver has ended; its error is on stderr")

    return run


@pytest.fixture
def drive_alone() -> Drive:
    """Like `drive`, in a process of its own imports, which may be measured or started by a prefix."""

    def run(*prefix: str, **options: Any) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [*prefix, sys.executable, str(DRIVER), json.dumps(options, default=str)],
            capture_output=True,
            text=True,
            timeout=120,
            env=ENVIRONMENT,
        )
        lines = done.stdout.strip().splitlines()
        if not lines and done.returncode >= 0:
            raise AssertionError(done.stderr)
        return done.returncode, json.loads(lines[-1]) if lines else {}

    return run


def poke(folder: Path, name: str, value: bytes, at: int = 0) -> None:
    """Overwrites bytes of a tensor in its file."""
    info = open_checkpoint(folder).tensors[name]
    with (folder / info.file).open("r+b") as file:
        file.seek(info.start + at)
        file.write(value)


def assert_incomplete(out: Path) -> None:
    """No READY, no manifest, and no file under its own name that is not whole."""
    assert not (out / "READY").exists()
    assert not (out / "moectl.json").exists()


@pytest.fixture
def reference(gpt_oss: Path, tmp_path: Path) -> dict[str, bytes]:
    """What a conversion that nothing disturbs writes."""
    convert(plan_of(gpt_oss), tmp_path / "reference")
    return folder_bytes(tmp_path / "reference")


def other_revision(source: Path, target: Path) -> Path:
    """A checkpoint with the same names, shapes, headers and config, and one other byte in each file."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        with file.open("rb") as data:
            infos = read_header(data, file.stat().st_size, file.name)
        whole = bytearray(file.read_bytes())
        for info in infos.values():
            if info.name.endswith("_blocks"):
                whole[info.start] ^= 1
        file.write_bytes(whole)
    return target


def interrupted(source: Path, out: Path, drive: Drive) -> None:
    """A conversion killed after its first layer."""
    assert drive(source=source, out=out, target="marlin", signal="SIGKILL", at=0.5)[0] == -9
