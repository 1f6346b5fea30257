"""A package index on this machine that behaves and misbehaves as servers do, and a small wheel on it."""

import hashlib
import os
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from devtools.lock_peers import files_of

from moectl.peers import wheel_stream
from moectl.peers.pinned import PinnedPeer

WHEEL = "humming_kernels-0.1.19-cp310-abi3-manylinux_2_28_x86_64.whl"
PATTERNS = {r"(humming/.+)": r"\1", r"(humming_kernels-[^/]+\.dist-info/METADATA)": r"\1"}


class Server(ThreadingHTTPServer):
    """Serves `files` by path.

    Attributes:
        ranges: whether parts are sent.
        cut: bytes after which each of the first `cuts` connections is dropped.
        errors: status codes of the first answers.
        asked: the paths and ranges requested.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, tuple[bytes, str]] = {}
        self.ranges, self.cut, self.cuts = True, 0, 0
        self.errors: list[int] = []
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        self.server.asked.append((self.path, asked))
        if self.server.errors:
            self.send_error(self.server.errors.pop(0))
            return
        if self.path not in self.server.files:
            self.send_error(404)
            return
        body, kind = self.server.files[self.path]
        whole, status = len(body), 200
        if asked and self.server.ranges:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            body, status = body[first : last + 1], 206
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{whole}")
        self.end_headers()
        if self.server.cuts:
            self.server.cuts -= 1
            body = body[: self.server.cut]
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(wheel_stream, "PAUSE", 0.0)
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def write_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("humming/__init__.py", "from . import layer\n" * 50)
        wheel.writestr("humming/layer.py", "")
        wheel.writestr("elsewhere/padding.bin", os.urandom(200_000))  # farther than GAP
        wheel.writestr(zipfile.ZipInfo("humming/data.bin"), os.urandom(50_000))  # stored
        tool = zipfile.ZipInfo("humming/_native/tool")
        tool.external_attr = 0o100755 << 16
        wheel.writestr(tool, b"\x7fELF" * 1000, zipfile.ZIP_DEFLATED)
        wheel.writestr("humming_kernels-0.1.19.dist-info/METADATA", "Name: humming-kernels\n")


@pytest.fixture
def peer(server: Server, tmp_path: Path) -> PinnedPeer:
    """A small Humming on the server, pinned as the real one is."""
    path = tmp_path / WHEEL
    write_wheel(path)
    data = path.read_bytes()
    server.files[f"/files/{WHEEL}"] = (data, "application/zip")
    return PinnedPeer(
        backend="humming",
        project="humming-kernels",
        version="0.1.19",
        wheel=WHEEL,
        url=f"{server.url}/files/{WHEEL}",
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        machine="x86_64",
        cuda="",
        files=files_of(path, PATTERNS),
    )
