"""Who may use what is written, by what it is made from."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moectl.files.access import BY_UMASK, Access, access_like, access_of
from moectl.files.atomic import copy_file, link_or_copy, write_file
from moectl.files.output_folder import create_folder

TEAM, OTHERS = os.getegid(), os.getegid() + 1


def status(mode: int, group: int = TEAM) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, 0, group, 0, 0, 0, 0))


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.lstat().st_mode))


@pytest.mark.parametrize(
    ("folder", "files", "new_files", "new_folders"),
    [
        (0o755, (0o644, 0o644), 0o644, 0o755),
        (0o755, (0o600, 0o644), 0o600, 0o700),
        (0o755, (0o644, 0o640), 0o640, 0o750),
        (0o700, (0o644,), 0o600, 0o700),
        (0o750, (0o644,), 0o640, 0o750),
        (0o711, (0o644,), 0o644, 0o711),
        (0o755, (0o604,), 0o604, 0o705),
        (0o555, (0o444,), 0o644, 0o755),
        (0o777, (0o666,), 0o644, 0o777),
        (0o2770, (0o660,), 0o640, 0o770),
        (0o500, (0o400,), 0o600, 0o700),
    ],
)
def test_of_a_source(
    folder: int, files: tuple[int, ...], new_files: int, new_folders: int, tmp_path: Path
) -> None:
    access = access_like(status(folder), map(status, files))
    assert (oct(access.of_file(tmp_path)), oct(access.of_folder(tmp_path))) == (
        oct(new_files),
        oct(new_folders),
    )


def test_another_group_gets_what_all_others_get(tmp_path: Path) -> None:
    for folder, file, group, expected in (
        (0o755, 0o640, OTHERS, 0o600),
        (0o755, 0o644, OTHERS, 0o644),
        (0o755, 0o640, TEAM, 0o640),
        (0o750, 0o644, OTHERS, 0o600),
    ):
        for of_folder in (group, OTHERS) if folder == 0o755 else (group,):
            access = access_like(status(folder, of_folder), [status(file, group)])
            assert oct(access.of_file(tmp_path)) == oct(expected), (oct(folder), oct(file), group, of_folder)
    two = access_like(status(0o755), [status(0o640, TEAM), status(0o640, OTHERS)])
    assert oct(two.of_file(tmp_path)) == "0o600"


def test_a_folder_that_hands_its_group_on(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root gives a folder to a group that it is not in")
    os.chown(tmp_path, -1, OTHERS)
    tmp_path.chmod(0o2755)
    assert oct(access_like(status(0o755), [status(0o640, OTHERS)]).of_file(tmp_path)) == "0o640"
    assert oct(access_like(status(0o755), [status(0o640, TEAM)]).of_file(tmp_path)) == "0o600"


def test_what_both_permit() -> None:
    assert Access(0o640, 0o750) & Access(0o604, 0o705) == Access(0o600, 0o700)
    assert BY_UMASK & Access(0o640, 0o750, TEAM) == Access(0o640, 0o750, TEAM)


def test_the_umask_takes_more_away(tmp_path: Path) -> None:
    public = access_like(status(0o755), [status(0o644)])
    with umask(0o077):
        write_file(tmp_path / "file", b"", public)
        create_folder(tmp_path / "folder", public)
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == ("0o600", "0o700")


def test_links_are_copies_where_they_would_be_open_to_more(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(0o700)
    out.mkdir(0o755)
    (source / "file").write_bytes(b"data")
    (source / "file").chmod(0o644)
    access = access_of(source, ["file"])
    with umask(0o022), (source / "file").open("rb") as file:
        link_or_copy(file.fileno(), "file", out / "a", access)
        assert mode(out / "a") == "0o600" and not (out / "a").samefile(source / "file")
        out.chmod(0o700)
        link_or_copy(file.fileno(), "file", out / "b", access)
        assert (out / "b").samefile(source / "file")
        copy_file(file.fileno(), "file", out / "c", access)
    assert mode(out / "c") == "0o600" and (out / "c").read_bytes() == (out / "a").read_bytes() == b"data"


def test_a_link_is_of_the_open_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"first")
    with (tmp_path / "file").open("rb") as file:
        (tmp_path / "file").rename(tmp_path / "kept")
        (tmp_path / "file").write_bytes(b"second")
        link_or_copy(file.fileno(), "file", tmp_path / "linked")
        assert (tmp_path / "linked").samefile(tmp_path / "kept")
        (tmp_path / "kept").unlink()
        (tmp_path / "linked").unlink()
        link_or_copy(file.fileno(), "file", tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == b"first"


def test_planted_names_are_replaced_and_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    for plant in (Path.symlink_to, Path.hardlink_to):
        for name in ("file", "file.partial"):
            (tmp_path / name).unlink(missing_ok=True)
            plant(tmp_path / name, tmp_path / "precious")
            write_file(tmp_path / "file", b"new")
            assert (tmp_path / "precious").read_bytes() == b"precious"
            assert (tmp_path / "file").read_bytes() == b"new" and not (tmp_path / "file").is_symlink()
            assert not (tmp_path / "file.partial").exists()
