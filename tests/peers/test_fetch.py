"""Fetching pinned files, from a server on this machine that behaves and misbehaves as package indexes do."""

import errno
import json
import shutil
import stat
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from devtools.lock_peers import files_of

from moectl.capabilities.unpacked_libraries import LIBRARIES, find_peer, find_peers
from moectl.errors import CheckFailed, Unavailable, UsageError
from moectl.files import atomic
from moectl.files.lock import Lock
from moectl.peers import fetch as fetching
from moectl.peers import pinned, wheel_stream
from moectl.peers.fetch import DONE, MISSING, OTHER, fetch, state_of
from moectl.peers.pinned import PinnedPeer, check_path, pinned_peers
from moectl.peers.wheel_stream import WholeFileNeeded
from support.package_index import WHEEL, Server, peer, server

__all__ = ["peer", "server"]  # fixtures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "peers"


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {fetching.LOCK_FILE}


def test_only_the_ranges_with_the_files_are_transferred(
    server: Server, peer: PinnedPeer, folder: Path
) -> None:
    steps: list[tuple[int, int, str]] = []
    assert state_of(peer, folder) == MISSING
    received = fetch([peer], folder, progress=lambda *step: steps.append(step))
    assert received == peer.download < 100_000 < peer.size and len(server.asked) == len(peer.spans) == 2
    assert steps[-1] == (received, received, "humming")
    assert left_in(folder) == {"humming", "humming_kernels-0.1.19.dist-info"}
    assert state_of(peer, folder) == DONE and find_peer("humming", folder) == folder / "humming"
    assert [one.version for one in find_peers(folder)] == ["0.1.19"]
    assert (folder / "humming/_native/tool").stat().st_mode & stat.S_IXUSR
    assert not (folder / "humming/layer.py").stat().st_mode & stat.S_IXUSR


def test_a_server_without_ranges_is_read_whole_only_if_that_is_allowed(
    server: Server, peer: PinnedPeer, folder: Path
) -> None:
    server.ranges = False
    with pytest.raises(WholeFileNeeded, match="does not send parts of humming_kernels") as caught:
        fetch([peer], folder)
    assert caught.value.size == peer.size and left_in(folder) == set()
    last = peer.spans[-1][1]
    assert fetch([peer], folder, allow_whole=True) >= last and state_of(peer, folder) == DONE


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_resumed(ranges: bool, server: Server, peer: PinnedPeer, folder: Path) -> None:
    server.ranges, server.cut, server.cuts = ranges, 40_000, 2
    fetch([peer], folder, allow_whole=True)
    assert state_of(peer, folder) == DONE
    firsts = [int(asked[6:].split("-")[0]) for _, asked in server.asked if asked]
    assert firsts == sorted(firsts) if ranges else len(server.asked) == 3


def test_errors_that_pass_are_tried_again_and_others_are_told(
    server: Server, peer: PinnedPeer, folder: Path
) -> None:
    server.errors = [503, 429]
    fetch([peer], folder)
    server.errors = [403]
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1 answered 403 \(Forbidden\) for humming_kernels"):
        fetch([peer], folder)
    server.errors = [503] * 10
    with pytest.raises(Unavailable, match="answered 503"):
        fetch([peer], folder)
    assert len(server.errors) == 10 - wheel_stream.ATTEMPTS


def test_without_network_nothing_is_left(peer: PinnedPeer, folder: Path, server: Server) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(Unavailable, match=r"cannot reach 127\.0\.0\.1: Connection refused") as caught:
        fetch([peer], folder)
    assert "--index-url" in caught.value.hint and left_in(folder) == set()


def test_a_file_that_ends_early_is_refused(server: Server, peer: PinnedPeer, folder: Path) -> None:
    server.cut, server.cuts = 0, 100
    with pytest.raises(Unavailable, match=r"the connection to .* broke|ended .* early"):
        fetch([peer], folder)
    assert left_in(folder) == set()


def test_other_bytes_are_refused_and_what_was_there_stays(
    server: Server, peer: PinnedPeer, folder: Path
) -> None:
    fetch([peer], folder)
    data, kind = server.files[f"/files/{WHEEL}"]
    big = next(file for file in peer.files if not file.deflated)
    damaged = bytearray(data)
    damaged[big.offset + 100] ^= 1
    server.files[f"/files/{WHEEL}"] = (bytes(damaged), kind)
    with pytest.raises(Unavailable, match=r"humming/data.bin in .* is not the pinned file: its SHA-256 is"):
        fetch([peer], folder)
    assert state_of(peer, folder) == DONE and len(left_in(folder)) == 2
    server.files[f"/files/{WHEEL}"] = (data + b"more", kind)
    with pytest.raises(Unavailable, match="expected bytes"):
        fetch([peer], folder)
    server.ranges = False
    with pytest.raises(Unavailable, match="has another file"):
        fetch([peer], folder, allow_whole=True)


def test_data_that_unpack_to_more_than_pinned_are_cut_off(
    server: Server, peer: PinnedPeer, folder: Path
) -> None:
    first = peer.files[0]
    assert first.deflated and first.size > 100
    small = replace(peer, files=(replace(first, size=100),))
    with pytest.raises(Unavailable, match="is not the pinned file"):
        fetch([small], folder)
    garbage = replace(peer, files=(replace(first, offset=first.offset + 3),))
    with pytest.raises(Unavailable, match="is not the pinned file"):
        fetch([garbage], folder)
    assert left_in(folder) == set()


def test_a_full_disk_is_told_before_anything_is_transferred(
    server: Server, peer: PinnedPeer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(Unavailable, match=r"has 1 MB free, and 17 MB are needed"):
        fetch([peer], folder)
    assert server.asked == [] and left_in(folder) == set()


def test_an_interrupt_leaves_what_is_complete_and_the_next_run_clears_the_rest(
    server: Server, peer: PinnedPeer, folder: Path
) -> None:
    def interrupt(done: int, total: int, text: str) -> None:
        if done > peer.download + 1000:
            raise KeyboardInterrupt

    second = replace(peer, files=tuple(replace(f, path=f"again-{f.path}") for f in peer.files))
    with pytest.raises(KeyboardInterrupt):
        fetch([peer, second], folder, progress=interrupt)
    assert (
        left_in(folder) == {"humming", "humming_kernels-0.1.19.dist-info"} and state_of(peer, folder) == DONE
    )
    (folder / f"{fetching.UNFINISHED}humming-killed").mkdir()
    fetch([peer], folder)
    assert left_in(folder) == {"humming", "humming_kernels-0.1.19.dist-info"}


def test_one_process_at_a_time_writes(peer: PinnedPeer, folder: Path) -> None:
    folder.mkdir()
    with (folder / fetching.LOCK_FILE).open("w") as held:
        lock = Lock(folder / fetching.LOCK_FILE, held.fileno())
        lock.take()
        with pytest.raises(Unavailable, match="another download is writing to"):
            fetch([peer], folder)


def test_another_version_is_replaced_whole(peer: PinnedPeer, folder: Path) -> None:
    (folder / "humming").mkdir(parents=True)
    (folder / "humming/layer.py").write_text("old = 1\n")
    (folder / "humming/removed_since.py").write_text("")
    assert state_of(peer, folder) == OTHER
    fetch([peer], folder)
    assert state_of(peer, folder) == DONE and not (folder / "humming/removed_since.py").exists()


def test_a_library_that_is_replaced_is_never_missing(
    peer: PinnedPeer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there at each change of a name is the earlier library or the new one."""
    (folder / "humming").mkdir(parents=True)
    (folder / "humming/old.py").write_text("")
    seen: list[str] = []

    def look(*args: object) -> bool:
        seen.append("old" if (folder / "humming/old.py").exists() else state_of(peer, folder))
        if len(seen) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return exchanged(*args)  # type: ignore[arg-type]

    exchanged = atomic.rename_exchange
    monkeypatch.setattr(atomic, "rename_exchange", look)
    with pytest.raises(Unavailable, match="Input/output error"):
        fetch([peer], folder)
    assert (folder / "humming/old.py").exists()
    fetch([peer], folder)
    assert seen == ["old"] * 3 and state_of(peer, folder) == DONE
    assert left_in(folder) == {"humming", "humming_kernels-0.1.19.dist-info"}


def test_a_link_in_place_of_a_library_is_not_followed(peer: PinnedPeer, folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "keep").write_text("")
    folder.mkdir()
    (folder / "humming").symlink_to(mine)
    fetch([peer], folder)
    assert [path.name for path in mine.iterdir()] == ["keep"] and not (folder / "humming").is_symlink()


@pytest.mark.parametrize("json_page", [True, False])
def test_a_mirror_is_asked_for_the_file_by_name(
    json_page: bool, server: Server, peer: PinnedPeer, folder: Path
) -> None:
    there = f"../../files/{WHEEL}"
    html = f'<a href="{there}#sha256=0">{WHEEL}</a><a href="other.whl">other</a>'.encode()
    page = json.dumps({"files": [{"filename": WHEEL, "url": there}]}).encode()
    kind = "application/vnd.pypi.simple.v1+json" if json_page else "text/html"
    server.files["/simple/humming-kernels/"] = (page if json_page else html, kind)
    gone = replace(peer, url="https://files.example.invalid/x.whl")
    fetch([gone], folder, index=f"{server.url}/simple/")
    assert state_of(peer, folder) == DONE
    server.files["/simple/humming-kernels/"] = (b"<html></html>" if not json_page else b"[", kind)
    words = "is not a page of a package index" if json_page else "does not have humming_kernels"
    with pytest.raises(Unavailable, match=words):
        fetch([gone], folder, index=f"{server.url}/simple")


@pytest.mark.parametrize(
    "url", ["file:///etc", "http://mirror.example/simple", "ftp://x/y", "nonsense", "https://"]
)
def test_indexes_are_https(url: str, peer: PinnedPeer, folder: Path) -> None:
    with pytest.raises(UsageError, match="the package index must be an https:// address"):
        fetch([peer], folder, index=url)


@pytest.mark.parametrize("url", ["https://me:secret@mirror.example/simple", "https://me@mirror.example"])
def test_an_index_with_a_login_is_refused_without_its_password(
    url: str, peer: PinnedPeer, folder: Path
) -> None:
    with pytest.raises(UsageError, match="has a user name in its address") as error:
        fetch([peer], folder, index=url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "host", ["https://" + "a" * 64, "https://...", "https://h:port", "LOCAL/\u00e9", "LOCAL/a b"]
)
def test_addresses_that_cannot_be_asked_for_are_told(
    host: str, server: Server, peer: PinnedPeer, folder: Path
) -> None:
    with pytest.raises(Unavailable, match="has an address that cannot be asked for"):
        fetch([peer], folder, index=host.replace("LOCAL", server.url))


def test_a_page_with_a_broken_link_is_told(server: Server, peer: PinnedPeer, folder: Path) -> None:
    page = json.dumps({"files": [{"filename": WHEEL, "url": "http://[x"}]}).encode()
    server.files["/simple/humming-kernels/"] = (page, "application/vnd.pypi.simple.v1+json")
    with pytest.raises(Unavailable, match="has no address of humming_kernels"):
        fetch([peer], folder, index=f"{server.url}/simple")


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a//b", "./a", "a\\b", "C:/x", "", "a/\0"])
def test_paths_that_lead_out_of_the_directory_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="must have a relative path"):
        check_path(path)


def hostile(path: Path, name: str, *, link: bool = False, twice: bool = False, bzip: bool = False) -> Path:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777 if link else stat.S_IFREG | 0o644) << 16
    with zipfile.ZipFile(path, "w") as wheel:
        for _ in range(1 + twice):
            wheel.writestr(info, "/etc/passwd", zipfile.ZIP_BZIP2 if bzip else zipfile.ZIP_DEFLATED)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_wheels_that_no_publisher_writes_are_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "x.whl"
    every = {r"(.+)": r"\1"}
    for name in ("../outside.py", "/etc/cron.d/x", "humming/../../x"):
        with pytest.raises(CheckFailed, match="must have a relative path"):
            files_of(hostile(wheel, name), every)
    with pytest.raises(CheckFailed, match="is a link"):
        files_of(hostile(wheel, "humming/x", link=True), every)
    with pytest.raises(CheckFailed, match="two files humming/x"):
        files_of(hostile(wheel, "humming/x", twice=True), every)
    with pytest.raises(CheckFailed, match="has compression"):
        files_of(hostile(wheel, "humming/x", bzip=True), every)
    with pytest.raises(CheckFailed, match="has none of the files"):
        files_of(hostile(wheel, "humming/x"), {"vllm/.+": "x"})
    monkeypatch.setattr("devtools.lock_peers.LARGEST_FILE", 10)
    with pytest.raises(CheckFailed, match="larger than"):
        files_of(hostile(wheel, "humming/x"), every)


def test_the_pinned_releases_are_whole() -> None:
    releases = pinned_peers()
    assert {(one.backend, one.machine) for one in releases} == {
        (backend, machine) for backend in LIBRARIES for machine in ("x86_64", "aarch64")
    }
    for one in releases:
        assert one.url.startswith("https://files.pythonhosted.org/") and one.url.endswith(one.wheel)
        assert len(one.sha256) == 64 and one.version in one.wheel and one.machine in one.wheel
        assert one.glibc == (2, 28) and len({file.path for file in one.files}) == len(one.files)
        ends = [0]
        for file in one.files:
            assert ends[-1] < file.offset and file.size < 96 << 20 and len(file.sha256) == 64
            ends.append(file.offset + file.stored)
        assert ends[-1] < one.size and one.download < 70_000_000
        assert any(path.endswith("LICENSE") for path in (file.path for file in one.files))


def test_machines_without_wheels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned.platform, "machine", lambda: "riscv64")
    with pytest.raises(Unavailable, match=r"with glibc on x86_64 and aarch64, this is linux riscv64"):
        pinned.pinned_peer("marlin")
    monkeypatch.undo()
    monkeypatch.setattr(pinned.platform, "libc_ver", lambda: ("glibc", "2.17"))
    with pytest.raises(Unavailable, match=r"needs glibc 2\.28 or newer, this machine has 2\.17"):
        pinned.pinned_peer("marlin")
