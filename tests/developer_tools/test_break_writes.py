"""`scripts/break_writes` disturbs commands that write, and knows what is wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from devtools.writes.child_process import Fork, files_below
from devtools.writes.power_cuts import after, cut, lay_out
from devtools.writes.watched_disk import DiskFault, DiskLog, WatchedDisk

from moectl.files.atomic import write_file
from support.scripts import SCRIPTS


@pytest.mark.parametrize(
    "names",
    ["marlin;rows", pytest.param("refit;synth;peers, replaced;tuned file", marks=pytest.mark.slow)],
)
def test_some_cases_of_every_kind_leave_nothing_wrong(names: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "break_writes", "--cases", "1", "--seed", "2", "--only", names, "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    document = json.loads(done.stdout)
    assert document["defects"] == [] and sum(document["cases"].values()) == 3
    assert document["cases"]["race"] == document["cases"]["source changed"] == 1


def watched(folder: Path, action: Callable[[], object], fault: DiskFault | None = None) -> tuple[int, str]:
    """How a fork ended that does `action`, with a fault, and what it printed."""

    def run() -> None:
        WatchedDisk(folder, fault).install()
        action()

    ended = Fork(run, folder.parent / "said").ended()
    return ended.status, ended.stderr


def two_files(folder: Path) -> None:
    """Two files, one by `os` and one through Python's buffers."""
    write_file(folder / "a", b"first")
    with (folder / "b").open("w") as file:
        file.write("second")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "case").mkdir()
    return tmp_path / "case"


def test_a_process_is_killed_within_a_write(folder: Path) -> None:
    assert watched(folder, lambda: two_files(folder), DiskFault("kill within", 3))[0] == -signal.SIGKILL
    assert files_below(folder) == {"a.partial": b"fi\0\0\0"}
    # What the first one left is removed first.
    assert watched(folder, lambda: two_files(folder), DiskFault("kill within", 9))[0] == -signal.SIGKILL
    assert files_below(folder) == {"a": b"first", "b": b"sec"}


@pytest.mark.parametrize(
    ("kind", "step", "left"),
    [
        ("ENOSPC", 3, {}),
        ("dead disk", 8, {"a": b"first", "b": b""}),
        ("read-only", 5, {"a.partial": b"first"}),
        ("disk full", 7, {"a": b"first"}),
    ],
)
def test_a_call_fails(folder: Path, kind: str, step: int, left: dict[str, bytes]) -> None:
    status, said = watched(folder, lambda: two_files(folder), DiskFault(kind, step))
    number = {"read-only": errno.EROFS, "disk full": errno.ENOSPC, "dead disk": errno.EIO}.get(
        kind
    ) or getattr(errno, kind)
    assert status == 3 and (os.strerror(number) in said or "the disk is full" in said)
    assert files_below(folder) == left


def log_of(folder: Path, action: Callable[[], object]) -> DiskLog:
    """What `action` changes, as a fork says."""
    import pickle

    def run() -> None:
        disk = WatchedDisk(folder, record=True)
        disk.install()
        action()
        (folder.parent / "log").write_bytes(pickle.dumps(disk.log()))

    assert Fork(run, folder.parent / "said").ended().status == 0
    found: DiskLog = pickle.loads((folder.parent / "log").read_bytes())
    return found


def held(folder: Path, files: object) -> dict[str, bytes]:
    assert isinstance(files, dict)
    return {path.removeprefix(f"{folder}/"): data for path, data in files.items()}


def test_what_is_synced_outlasts_a_power_cut_and_nothing_else_must(folder: Path) -> None:
    log, dice = log_of(folder, lambda: two_files(folder)), random.Random(1)
    names = [change.name for change in log.changes]
    assert names == ["create", "resize", "write", "sync", "rename", "sync", "create", "write"]
    assert held(folder, after(log, 8)) == files_below(folder) == {"a": b"first", "b": b"second"}
    assert held(folder, cut(log, 8, "cut, synced", dice)) == {"a": b"first"}
    assert held(folder, cut(log, 8, "cut, names first", dice)) == {"a": b"first", "b": b""}
    assert held(folder, cut(log, 3, "cut, names first", dice)) == {"a.partial": b""}
    assert held(folder, cut(log, 5, "cut, synced", dice)) == {}
    seen = {tuple(held(folder, cut(log, 8, "cut, some", random.Random(n))).items()) for n in range(40)}
    assert (("a", b"first"),) in seen and (("a", b"first"), ("b", b"second")) in seen


def test_a_file_that_is_renamed_before_it_is_synced_is_seen_empty(folder: Path) -> None:
    def careless() -> None:
        (folder / "new").write_bytes(b"text")
        (folder / "new").rename(folder / "READY")

    log = log_of(folder, careless)
    files = cut(log, len(log.changes), "cut, names first", random.Random(0))
    assert held(folder, files) == {"READY": b""}
    for path in folder.iterdir():
        path.unlink()
    lay_out(files)
    assert files_below(folder) == {"READY": b""}
