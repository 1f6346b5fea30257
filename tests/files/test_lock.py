"""The lock of a single writer where the file system has no locks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moectl.files.lock import Busy, Lock


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "progress.jsonl"
    path.touch()
    return path


def taken(log: Path) -> None:
    fd = os.open(log, os.O_RDWR)
    try:
        lock = Lock(log, fd)
        lock.take()
        assert log.with_name("progress.jsonl.lock").exists()
        lock.release()
        assert not log.with_name("progress.jsonl.lock").exists()
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "holder", ["{host} " + "1" * 5000, "{host} \u00b2", "{host} \u0663", "{host} -1", "{host}", "", "other 1"]
)
def test_a_holder_that_cannot_be_asked_is_at_work(log: Path, holder: str) -> None:
    text = holder.format(host=socket.gethostname())
    log.with_name("progress.jsonl.lock").write_text(text, encoding="utf-8")
    with pytest.raises(Busy, match=r"says progress\.jsonl\.lock"):
        taken(log)
    assert log.with_name("progress.jsonl.lock").read_text(encoding="utf-8") == text


def test_the_lock_of_a_process_that_has_ended_is_replaced(log: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    log.with_name("progress.jsonl.lock").write_text(f"{socket.gethostname()} {ended.pid}")
    taken(log)
