"""Files of a folder are opened by name, and nothing outside of it, whatever links are put there meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from moectl.errors import CheckpointError
from moectl.files.folder_handle import FolderHandle, file_findings, open_inside, read_inside, sha256_inside

INSIDE, SECRET = b"inside", b"secret"
OPENINGS = 3000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a file in it and one in ``sub``, beside a file and a folder of secrets."""
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    for path in (home / "file", home / "sub" / "file"):
        path.write_bytes(INSIDE)
    for path in (tmp_path / "secret", tmp_path / "outside" / "file"):
        path.write_bytes(SECRET)
    return home


def test_files_are_opened_by_name(home: Path) -> None:
    for name in ("file", "sub/file"):
        assert read_inside(home, name, 100) == INSIDE
    with FolderHandle(home) as folder:
        fd = folder.open("file")
        home.rename(home.with_name("moved"))
        with folder.file("sub/file") as file:
            assert file.read(100) == INSIDE
    assert os.read(fd, 100) == INSIDE
    os.close(fd)


def link_to_file(home: Path) -> str:
    (home / "link").symlink_to(home.parent / "secret")
    return "link"


def relative_link(home: Path) -> str:
    (home / "sub" / "link").symlink_to("../../secret")
    return "sub/link"


def link_to_folder(home: Path) -> str:
    (home / "link").symlink_to(home.parent / "outside")
    return "link/file"


def link_to_link(home: Path) -> str:
    (home / "first").symlink_to("second")
    (home / "second").symlink_to(home.parent / "secret")
    return "first"


def link_up_and_down(home: Path) -> str:
    (home / "up").symlink_to("..")
    return "up/secret"


def link_beside(home: Path) -> str:
    """A folder whose name begins like that of the checkpoint's."""
    (home.parent / "home-of-others").mkdir()
    (home.parent / "home-of-others" / "file").write_bytes(SECRET)
    (home / "link").symlink_to("../home-of-others/file")
    return "link"


def link_to_process(home: Path) -> str:
    (home / "link").symlink_to("/proc/self/environ")
    return "link"


LEADING_OUT = (
    link_to_file,
    relative_link,
    link_to_folder,
    link_to_link,
    link_up_and_down,
    link_beside,
    link_to_process,
)


@pytest.mark.parametrize("plant", LEADING_OUT)
def test_links_that_lead_out(home: Path, plant: Callable[[Path], str]) -> None:
    name = plant(home)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        read_inside(home, name, 1 << 20)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        sha256_inside(home, name)
    assert "outside of its folder" in file_findings(home, name, len(SECRET), "")[0]


@pytest.mark.parametrize(
    "name", ["../secret", "sub/../../secret", "/etc/hostname", "", ".", "sub//file", "a\0b"]
)
def test_names_that_are_none(home: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="not the name of a file inside its folder"):
        read_inside(home, name, 100)


def test_links_within_the_folder_are_followed(home: Path, tmp_path: Path) -> None:
    (home / "relative").symlink_to("sub/file")
    (home / "sub" / "up").symlink_to("../file")
    (home / "absolute").symlink_to(home / "file")
    (home / "around").symlink_to("../home/file")
    (home / "folder").symlink_to("sub")
    (tmp_path / "other name").symlink_to(home)
    for folder in (home, tmp_path / "other name"):
        for name in ("relative", "sub/up", "absolute", "around", "folder/file", "folder/up"):
            assert read_inside(folder, name, 100) == INSIDE


def test_what_is_no_file(home: Path) -> None:
    os.mkfifo(home / "pipe")
    (home / "loop").symlink_to("loop")
    (home / "dangling").symlink_to("nothing")
    (home / "itself").symlink_to(".")
    for name, says in {
        "pipe": "not a file",
        "sub": "not a file",
        "itself": "not a file",
        "loop": "cannot be read: Too many levels",
        "dangling": "cannot be found",
        "nothing": "cannot be found",
        "file/below": "cannot be read: Not a directory",
    }.items():
        with pytest.raises(CheckpointError, match=says):
            read_inside(home, name, 100)
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        read_inside(home / "nowhere", "file", 100)
    with pytest.raises(CheckpointError, match="cannot be opened: Not a directory"):
        read_inside(home / "file", "file", 100)


def test_long_files_are_not_read(home: Path) -> None:
    os.truncate(home / "file", 1 << 40)
    with pytest.raises(CheckpointError, match="expected at most 100"):
        read_inside(home, "file", 100)


def test_findings(home: Path) -> None:
    sha256 = sha256_inside(home, "file")
    assert file_findings(home, "file", len(INSIDE), sha256) == []
    assert file_findings(home, "file", 1, sha256) == ["file must have 1 bytes, got 6"]
    assert file_findings(home, "file", len(INSIDE), "0") == ["file fails its SHA-256 check"]
    assert file_findings(home, "nothing", 1, sha256) == ["nothing is missing"]


def test_nothing_stays_open(home: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for plant in LEADING_OUT[:2]:
        name = plant(home)
        for each in (name, "file", "sub/file", "nothing", "sub"):
            with suppress(CheckpointError):
                read_inside(home, each, 100)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@contextmanager
def swapping(swap: Callable[[], None]) -> Iterator[None]:
    """Calls `swap` in a tight loop of another thread."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            swap()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def file_and_link(home: Path) -> Callable[[], None]:
    """Makes ``file`` the file and a link to the secret by turns."""

    def swap() -> None:
        (home / "other").symlink_to(home.parent / "secret")
        (home / "other").replace(home / "file")
        (home / "other").write_bytes(INSIDE)
        (home / "other").replace(home / "file")

    return swap


def inner_and_outer_link(home: Path) -> Callable[[], None]:
    """Makes ``file`` a link into the folder and one out of it by turns."""

    def swap() -> None:
        for target in ("../secret", "sub/file"):
            (home / "other").symlink_to(target)
            (home / "other").replace(home / "file")

    return swap


def folder_and_link(home: Path) -> Callable[[], None]:
    """Makes ``sub`` the folder and a link to the folder of secrets by turns."""
    (home / "link").symlink_to(home.parent / "outside")

    def swap() -> None:
        (home / "sub").rename(home / "kept")
        (home / "link").rename(home / "sub")
        (home / "sub").rename(home / "link")
        (home / "kept").rename(home / "sub")

    return swap


@pytest.mark.parametrize(
    ("name", "swaps"),
    [("file", file_and_link), ("file", inner_and_outer_link), ("sub/file", folder_and_link)],
)
def test_links_swapped_in_while_files_are_opened(
    home: Path, name: str, swaps: Callable[[Path], Callable[[], None]]
) -> None:
    found = {INSIDE: 0, b"refused": 0}
    with swapping(swaps(home)), FolderHandle(home) as folder:
        for at in range(20 * OPENINGS):
            if at >= OPENINGS and all(found.values()):
                break
            try:
                with folder.file(name) if at % 2 else open_inside(home, name) as file:
                    data = file.read(100)
            except CheckpointError:
                data = b"refused"
            found[data] += 1  # KeyError for the secret
    assert found[INSIDE] and found[b"refused"], "the swaps were not seen"


def test_a_check_before_opening_would_be_fooled(home: Path) -> None:
    """The race is one that paths lose: what this file tests is seen to fail without descriptors."""
    seen = set()
    with swapping(file_and_link(home)):
        for _ in range(20 * OPENINGS):
            with suppress(OSError):  # a file that becomes a link while it is resolved
                if (home / "file").resolve().parent == home.resolve():
                    seen.add((home / "file").read_bytes())
            if SECRET in seen:
                break
    assert SECRET in seen


def test_hub_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repository / "blobs" / "1").write_bytes(INSIDE)
    (tmp_path / "secret").write_bytes(SECRET)
    (snapshot / "file").symlink_to("../../blobs/1")
    (snapshot / "whole").symlink_to(repository / "blobs" / "1")
    (snapshot / "beside").symlink_to("../../refs/main")
    (snapshot / "other").symlink_to("../4567/file")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_bytes(SECRET)
    (repository / "snapshots" / "4567").mkdir()
    (repository / "snapshots" / "4567" / "file").write_bytes(SECRET)
    assert read_inside(snapshot, "file", 100) == read_inside(snapshot, "whole", 100) == INSIDE
    for name in ("beside", "other"):
        with pytest.raises(CheckpointError, match="outside of its folder"):
            read_inside(snapshot, name, 100)
    (repository / "blobs" / "2").symlink_to(tmp_path / "secret")
    (snapshot / "through").symlink_to("../../blobs/2")
    with pytest.raises(CheckpointError, match="outside of its folder"):
        read_inside(snapshot, "through", 100)

    def swap() -> None:
        for target in (tmp_path / "secret", repository / "blobs" / "1"):
            (repository / "blobs" / "new").symlink_to(target)
            (repository / "blobs" / "new").replace(repository / "blobs" / "3")

    swap()
    (snapshot / "swapped").symlink_to("../../blobs/3")
    with swapping(swap), FolderHandle(snapshot) as folder:
        for _ in range(OPENINGS // 3):
            with suppress(CheckpointError), folder.file("swapped") as file:
                assert file.read(100) == INSIDE
