"""A small server that speaks as much of the Hub's protocol as reading a checkpoint takes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        if self.server.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            code = "GatedRepo" if self.server.private == "gated" else "RepoNotFound"
            self._send(401, b"{}", {"X-Error-Code": code})
            return
        api = re.fullmatch(r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/revision/(?P<revision>.+))?", path)
        file = re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", path)
        match = api or file
        if match is None or match["repo"] != "org/tiny":
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif match["revision"] not in (None, "main", "v1", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif api:
            self._listing()
        else:
            assert file is not None
            self._file(file["file"])

    def _listing(self) -> None:
        files = sorted(path for path in self.server.folder.iterdir())
        siblings = [{"rfilename": path.name, "size": path.stat().st_size + self.server.add} for path in files]
        document = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        path = self.server.folder / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if name.endswith(".safetensors") and self.server.failures > 0:
            self.server.failures -= 1
            self._send(503, b"", {})
        elif wanted is None or not self.server.ranges:
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


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """A running `Hub` of `folder`."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
