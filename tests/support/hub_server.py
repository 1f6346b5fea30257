"""A small server that speaks as much of the Hub's protocol as reading a checkpoint takes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_let_me_in"


class Hub(ThreadingHTTPServer):
    """Serves `folder` as ``org/tiny``; the knobs make it misbehave.

    Attributes:
        requests: (method, path, Range, status, bytes sent) of every request so far.
        private: models need `TOKEN`; ``"gated"`` says that access must be asked for.
        ranges: False ignores Range; ``"wrong"`` answers with another range.
        failures: so many requests for weights are answered with status 503 first.
        add: bytes added to every size that the listing states.
        retry_after: what a failure's Retry-After says, if anything.
        cut: so many answers to requests for weights break off halfway, first.
        slow: seconds that each request for weights takes.
        most_at_once: most requests for weights that were being answered at the same time.
        commit: the commit that the branch ``main`` stands for.
        hostile: what is done to answers instead, by a part of their path (`HOSTILE`).
        listing: what is sent instead of the list of files, if anything.
        headers: what files' headers are instead, or besides; DIGEST in them is a file's SHA-256.
        tokens: the Authorization of every request so far.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: list[tuple[str, str, str | None, int, int]] = []
        self.private: bool | str = False
        self.ranges: bool | str = True
        self.failures = 0
        self.add = 0
        self.retry_after: str | None = None
        self.cut = 0
        self.slow = 0.0
        self.most_at_once = self._at_once = 0
        self.commit = COMMIT
        self.hostile: dict[str, str] = {}
        self.listing: bytes | None = None
        self.headers: dict[str, str] = {}
        self.elsewhere = ""
        self.tokens: list[str | None] = []
        self.ending = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts a request for weights while it is being answered."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.slow)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1

    def take(self, knob: str) -> bool:
        """Counts `knob` down; True while it was above zero."""
        with self._lock:
            left = getattr(self, knob)
            setattr(self, knob, max(0, left - 1))
            return bool(left)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(self.path.split("?")[0])
        self.server.tokens.append(self.headers.get("Authorization"))
        for part, way in self.server.hostile.items():
            if part in path:
                with suppress(OSError):
                    HOSTILE[way](self)
                self.close_connection = True
                return
        if self.server.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            code = "GatedRepo" if self.server.private == "gated" else "RepoNotFound"
            self._send(401, b"{}", {"X-Error-Code": code})
            return
        api = re.fullmatch(r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/revision/(?P<revision>.+))?", path)
        file = re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", path)
        match = api or file
        if match is None or match["repo"] != "org/tiny":
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif match["revision"] not in (None, "main", "v1", COMMIT, self.server.commit):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif api:
            self._listing()
        else:
            assert file is not None
            self._file(file["file"])

    def _listing(self) -> None:
        files = sorted(path for path in self.server.folder.iterdir())
        siblings = [{"rfilename": path.name, "size": path.stat().st_size + self.server.add} for path in files]
        document = {
            "id": "org/tiny",
            "modelId": "org/tiny",
            "sha": self.server.commit,
            "siblings": siblings,
            "tags": [],
        }
        body = json.dumps(document).encode() if self.server.listing is None else self.server.listing
        self._send(200, body, {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        path = self.server.folder / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        headers = {
            "ETag": f'"{digest}"',
            "X-Repo-Commit": self.server.commit,
            "Accept-Ranges": "bytes",
            **{key: text.replace("DIGEST", digest) for key, text in self.server.headers.items()},
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if name.endswith(".safetensors"):
            with self.server.answering():
                self._weights(name, data, headers, wanted)
        else:
            self._part(data, headers, wanted)

    def _weights(self, name: str, data: bytes, headers: dict[str, str], wanted: re.Match[str] | None) -> None:
        if self.server.take("failures"):
            after = self.server.retry_after
            self._send(503, b"", {} if after is None else {"Retry-After": after})
        elif self.server.take("cut"):
            self._send(206, data[:100], {**headers, "Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"})
        else:
            self._part(data, headers, wanted)

    def _part(self, data: bytes, headers: dict[str, str], wanted: re.Match[str] | None) -> None:
        if wanted is None or not self.server.ranges:
            self._send(200, data, headers)
        else:
            start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            if self.server.ranges == "wrong":
                start += 1
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            self._send(206, data[start : end + 1], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.server.requests.append((self.command, self.path, self.headers.get("Range"), status, len(body)))
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True


def _begin(handler: _Handler, status: int = 200, **headers: str) -> None:
    wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
    if wanted is not None and status == 200:
        status = 206
        headers = {"Content_Range": f"bytes {wanted[1]}-{wanted[2]}/{1 << 30}", **headers}
    handler.send_response(status)
    stated = {"ETag": '"0"', "X-Repo-Commit": handler.server.commit, "Connection": "close", **headers}
    for key, value in stated.items():
        handler.send_header(key.replace("_", "-"), value)
    handler.end_headers()


def _endless(handler: _Handler) -> None:
    """Bytes without end, as fast as they are taken."""
    _begin(handler)
    while not handler.server.ending.is_set():
        handler.wfile.write(b" " * 65536)


def _trickle(handler: _Handler) -> None:
    """A byte now and then."""
    _begin(handler)
    while not handler.server.ending.wait(0.05):
        handler.wfile.write(b" ")


def _header_lines(handler: _Handler) -> None:
    """Header lines that never end."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while not handler.server.ending.wait(0.05):
        handler.wfile.write(b"X-More: 1\r\n")


def _silent(handler: _Handler) -> None:
    """No answer."""
    handler.server.ending.wait(60)


def _bomb(handler: _Handler) -> None:
    """Two megabytes that unpack to two gigabytes, to be taken for JSON."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    _begin(handler, Content_Encoding="gzip")
    for _ in range(2048):
        handler.wfile.write(packer.compress(b" " * (1 << 20)))
    handler.wfile.write(packer.flush())


def _busy(handler: _Handler) -> None:
    """Busy until tomorrow."""
    _begin(handler, 429, Retry_After="86400", Content_Length="0")


def _redirects(handler: _Handler) -> None:
    """A redirect to the same place."""
    _begin(handler, 302, Location=handler.path, Content_Length="0")


def _elsewhere(handler: _Handler) -> None:
    """A redirect to another host."""
    _begin(handler, 302, Location=handler.server.elsewhere + handler.path, Content_Length="0")


def _too_short(handler: _Handler) -> None:
    """Less than Content-Length says."""
    _begin(handler, Content_Length="5000000")
    if handler.command != "HEAD":
        handler.wfile.write(b"{}")


def _huge(handler: _Handler) -> None:
    """A terabyte, as Content-Length says."""
    _begin(handler, Content_Length=str(1 << 40))
    while handler.command != "HEAD" and not handler.server.ending.is_set():
        handler.wfile.write(b" " * 65536)


HOSTILE = {
    "endless": _endless,
    "trickle": _trickle,
    "header lines": _header_lines,
    "silent": _silent,
    "gzip bomb": _bomb,
    "busy": _busy,
    "redirects": _redirects,
    "elsewhere": _elsewhere,
    "too short": _too_short,
    "a terabyte": _huge,
}
"""Ways to answer that a reader must survive."""


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """A running `Hub` of `folder`."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.ending.set()
            hub.shutdown()
            thread.join()
