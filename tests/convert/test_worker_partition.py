"""Several processes that fill one folder, part by part."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moectl.convert.execute.convert import complete, convert
from moectl.convert.manifest.manifest import load_manifest
from moectl.convert.restore.verify import verify
from moectl.convert.worker_partition import WorkerPartition, parse_partition
from moectl.errors import CheckpointError, Unavailable, UsageError
from moectl.files.lock import Lock
from support.stream_checkpoints import folder_bytes, gpt_oss_checkpoint

from .conftest import plan_of

Drive = Callable[..., tuple[int, dict[str, Any]]]


def test_every_item_is_in_one_part() -> None:
    for items in range(12):
        for of in (1, 2, 3, 5, 11, 20):
            shares = [WorkerPartition(number, of).select(range(items)) for number in range(1, of + 1)]
            assert [item for share in shares for item in share] == list(range(items))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "-1/2", "1/2/3", "a/b", "1/99999", "1.0/2"])
def test_odd_parts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must look like 2/4"):
        parse_partition(text)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return gpt_oss_checkpoint(tmp_path / "source", num_hidden_layers=5)


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_parts_in_any_order_are_the_whole(source: Path, tmp_path: Path, of: int) -> None:
    plan, out = plan_of(source), tmp_path / "out"
    convert(plan, tmp_path / "whole")
    layers: list[int] = []
    for number in reversed(range(1, of + 1)):
        layers += convert(plan, out, partition=WorkerPartition(number, of)).converted
        with pytest.raises(CheckpointError, match=r"not a finished converted directory.*--finish"):
            load_manifest(out)
    assert sorted(layers) == [0, 1, 2, 3, 4]
    summary = complete(plan, out)
    assert summary.resumed == (0, 1, 2, 3, 4)
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
    assert verify(out, source).ok
    assert complete(plan, out).resumed == (0, 1, 2, 3, 4)


def test_what_is_missing_is_named(source: Path, tmp_path: Path, drive: Drive) -> None:
    plan, out = plan_of(source), tmp_path / "out"
    with pytest.raises(UsageError, match="holds no parts"):
        complete(plan, out)
    convert(plan, out, partition=WorkerPartition(2, 3))
    killed = drive(source=source, out=out, target="marlin", part="3/3", signal="SIGKILL", at=0.9)
    assert killed[0] == -9
    with pytest.raises(UsageError, match=r"part 1/3 was not started; part 3/3 lacks layers? "):
        complete(plan, out)
    convert(plan, out, partition=WorkerPartition(1, 3))
    with pytest.raises(UsageError, match=r"part 3/3 was started .*--resume"):
        convert(plan, out, partition=WorkerPartition(3, 3))
    convert(plan, out, partition=WorkerPartition(3, 3), resume=True)
    file = out / "moectl-layer-00002.experts"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"{file.name} was finished but is now missing or changed"):
        complete(plan, out)
    file.write_bytes(whole)
    complete(plan, out)
    assert verify(out, source).ok


def test_parts_of_other_conversions_do_not_mix(source: Path, tmp_path: Path) -> None:
    plan, out = plan_of(source), tmp_path / "out"
    convert(plan, out, partition=WorkerPartition(1, 2))
    before = folder_bytes(out)
    with pytest.raises(UsageError, match="holds a marlin-mxfp4 conversion, not trtllm-mxfp4"):
        convert(plan_of(source, "trtllm"), out, partition=WorkerPartition(2, 2))
    with pytest.raises(UsageError, match="holds parts of 2, part 1/3 was requested"):
        convert(plan, out, partition=WorkerPartition(1, 3))
    with pytest.raises(UsageError, match=r"not empty.*--part N/2"):
        convert(plan, out)
    with pytest.raises(UsageError, match="no conversion to resume"):
        convert(plan, out, resume=True)
    with pytest.raises(UsageError, match="holds a marlin-mxfp4 conversion"):
        shutil.copytree(out, tmp_path / "copy")
        (tmp_path / "copy" / "progress-2-of-2.jsonl").write_bytes(before["progress-1-of-2.jsonl"])
        complete(plan_of(source, "trtllm"), tmp_path / "copy")
    assert folder_bytes(out) == before


def test_a_part_is_written_once_and_others_beside_it(source: Path, tmp_path: Path) -> None:
    plan, out = plan_of(source), tmp_path / "out"
    told: list[str] = []

    def meddle(done: int, total: int, text: str) -> None:
        if not told:
            told.append("")
            convert(plan, out, partition=WorkerPartition(2, 2))
            for action in (
                lambda: convert(plan, out, partition=WorkerPartition(1, 2), resume=True),
                lambda: complete(plan, out),
            ):
                with pytest.raises(Unavailable, match="another conversion is writing"):
                    action()

    convert(plan, out, partition=WorkerPartition(1, 2), progress=meddle)
    assert told
    complete(plan, out)
    assert verify(out, source).ok


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_a_file_says_who_writes(source: Path, tmp_path: Path, no_locks: None) -> None:
    plan, out = plan_of(source), tmp_path / "out"
    told: list[str] = []

    def meddle(done: int, total: int, text: str) -> None:
        if not told:
            with pytest.raises(Unavailable, match="no locks that end with a process") as caught:
                convert(plan, out, resume=True)
            told.append(str(caught.value))

    convert(plan, out, progress=meddle)
    assert told
    assert not list(out.glob("*.lock"))
    assert verify(out, source).ok


def test_a_lock_file_of_a_dead_process_is_taken_over(tmp_path: Path, no_locks: None) -> None:
    path = tmp_path / "log"
    beside = tmp_path / "log.lock"
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    with path.open("w") as file:
        for text in (f"{socket.gethostname()} {os.getpid()}", f"elsewhere {gone}", ""):
            beside.write_text(text)
            with pytest.raises(Unavailable, match="another conversion is writing"):
                Lock(path, file.fileno()).take()
        beside.write_text(f"{socket.gethostname()} {gone}")
        lock = Lock(path, file.fileno())
        lock.take()
        assert beside.read_text() == f"{socket.gethostname()} {os.getpid()}"
        lock.release()
    assert not beside.exists()
