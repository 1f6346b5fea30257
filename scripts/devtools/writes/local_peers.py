"""A package index on this machine with one small library, for `moectl peers`."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moectl.peers.pinned import PinnedPeer

WHEEL = "humming_kernels-0.1.19-cp310-abi3-manylinux_2_28_x86_64.whl"
PATTERNS = {r"(humming/.+)": r"\1", r"(humming_kernels-[^/]+\.dist-info/METADATA)": r"\1"}
ADDRESS = "address.txt"


def write_wheel(path: Path) -> None:
    """A wheel with a stored file and deflated ones."""
    noise = random.Random(7)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("humming/__init__.py", "from . import layer\n" * 50)
        wheel.writestr("humming/layer.py", "x = 1\n")
        wheel.writestr(zipfile.ZipInfo("humming/data.bin"), noise.randbytes(20_000))
        wheel.writestr("humming_kernels-0.1.19.dist-info/METADATA", "Name: humming-kernels\n")


class _RangeHandler(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        first, last = map(int, self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-"))
        data = self.body[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.body)}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(inputs: Path) -> Iterator[None]:
    """Serves the wheel in `inputs`, which is made, from a fork that ends with the block."""
    inputs.mkdir(exist_ok=True)
    write_wheel(inputs / WHEEL)
    _RangeHandler.body = (inputs / WHEEL).read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _RangeHandler)
    (inputs / ADDRESS).write_text(f"http://127.0.0.1:{server.server_address[1]}")
    process = os.fork()
    if not process:
        try:
            server.serve_forever()
        finally:
            os._exit(0)
    server.server_close()
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def pinned_at(inputs: Path) -> PinnedPeer:
    """The library, pinned as the real ones are."""
    from devtools.lock_peers import files_of
    from moectl.peers.pinned import PinnedPeer

    path = inputs / WHEEL
    data = path.read_bytes()
    return PinnedPeer(
        backend="humming",
        project="humming-kernels",
        version="0.1.19",
        wheel=WHEEL,
        url=f"{(inputs / ADDRESS).read_text()}/files/{WHEEL}",
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        machine="x86_64",
        cuda="",
        files=files_of(path, PATTERNS),
    )
