"""New files beside old ones: whole or not at all, by one process at a time, on disks that refuse."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from moectl.errors import Unavailable
from moectl.files import atomic
from moectl.files.atomic import NewFile, exchange, replace_file, replacing, write_exactly, write_file
from moectl.files.lock import folder_lock
from moectl.files.output_folder import create_folder


def test_only_a_refused_write_is_the_outputs_fault(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError), replacing(path, 3):
        (tmp_path / "elsewhere").read_bytes()
    assert not list(tmp_path.iterdir())


def test_a_refused_write_names_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with (
        pytest.raises(Unavailable, match="cannot write first, which needs 3 B: the disk is full"),
        replacing(tmp_path / "first", 3) as fd,
        replacing(tmp_path / "second", 5),
    ):
        monkeypatch.setattr(os, "pwrite", full)
        write_exactly(fd, memoryview(b"abc"), 0)
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    """The second waits for the first; both are whole, and the last one stays."""
    path = tmp_path / "page.html"
    first = NewFile(path, 9)
    second = threading.Thread(target=write_file, args=(path, b"other"))
    second.start()
    first.write(memoryview(b"the first"), 0)
    second.join(0.1)
    assert second.is_alive() and not path.exists()
    first.commit()
    second.join(10)
    assert path.read_bytes() == b"other" and [*tmp_path.iterdir()] == [path]


def test_what_a_killed_writer_left_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "times.json.partial").write_bytes(b"half of something longer")
    replace_file(tmp_path / "times.json", b"{}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"times.json": b"{}"}


@pytest.mark.parametrize("refused", ["pwrite", "fsync", "replace", "posix_fallocate"])
def test_a_disk_that_refuses_everything_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """What cannot be removed either stays, and the error is still that of the write."""

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in (refused, "unlink"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(Unavailable, match=r"cannot write .*page\.html: Read-only file system"):
        write_file(tmp_path / "page.html", b"text")


@pytest.mark.parametrize("possible", [True, False])
def test_names_are_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, possible: bool) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / folder.name).touch()
    if not possible:
        monkeypatch.setattr(atomic, "rename_exchange", lambda first, second: False)
    exchange(one, other)
    assert [path.name for path in one.iterdir()] == ["other"] and (other / "one").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]
    with pytest.raises(FileNotFoundError):
        exchange(one, tmp_path / "missing")
    assert one.exists()


def test_a_new_folder_is_durable_with_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    create_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    create_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_a_locked_folder_is_waited_for(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with folder_lock(tmp_path):
            entered.set()

    with folder_lock(tmp_path):
        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.1)
    other.join(10)
    assert entered.is_set() and not [*tmp_path.iterdir()]
