"""Safetensors headers of Hub checkpoints, kept by commit in the user's cache folder.

They lie where the Hub client keeps what other libraries derive from its files:
``$HF_HOME/assets/moectl/models--ORG--NAME/COMMIT`` (or ``$HF_ASSETS_CACHE``). A commit never changes, so
nothing here grows old; what does not read back as it was written is as good as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.safe_reading import open_regular
from ...files.safetensors_header import HEADER_LIMIT, LENGTH_BYTES, Budget, read_header
from ...files.strict_json import parse_json_object
from ...files.tensor_table import TensorTable, joined
from .shards import index_files, shard_names

LIBRARY = "moectl"
LISTING = "files.json"
"""Sizes of the weight files whose headers are all there."""

RECORD_LIMIT = 4096
"""Longest first line of a cached header: its file's name and size, and a checksum."""


class HeaderCache:
    """The cached headers of `repo` at `commit`; reading creates nothing.

    `refused` is the system's reason why something could not be written, which harms nothing but speed.
    """

    def __init__(self, repo: str, commit: str) -> None:
        from huggingface_hub import constants

        self.folder = Path(constants.HF_ASSETS_CACHE).expanduser() / LIBRARY / _folder_name(repo) / commit
        self.refused = ""

    def read(self, name: str) -> tuple[bytes, int] | None:
        """The first bytes of weight file `name` to its header's end and the file's size; None if not kept."""
        data = self._read(self._place(name), RECORD_LIMIT + LENGTH_BYTES + HEADER_LIMIT)
        line, _, start = (data or b"").partition(b"\n")
        found = _object(line)
        if found is None or found.get("file") != name or found.get("sha256") != _digest(start):
            return None
        size = found.get("size")
        return (start, size) if isinstance(size, int) and not isinstance(size, bool) else None

    def write(self, name: str, start: bytes, size: int) -> None:
        """Keeps the first bytes of weight file `name`, which has `size` bytes."""
        record = {"file": name, "size": size, "sha256": _digest(start)}
        self._write(self._place(name), json.dumps(record).encode() + b"\n" + start)

    def write_listing(self, sizes: Mapping[str, int]) -> None:
        """Says that the headers of these weight files, with these sizes, are all there."""
        self._write(self.folder / LISTING, json.dumps(dict(sorted(sizes.items()))).encode())

    def tensors(self, index: Mapping[str, Any] | None) -> TensorTable | None:
        """Every tensor of the checkpoint whose index is this; None unless all its headers are kept."""
        sizes = _object(self._read(self.folder / LISTING, HEADER_LIMIT) or b"")
        if sizes is None:
            return None
        tables, budget = [], Budget()
        try:
            for name in shard_names(sizes, None if index is None else index_files(index)):
                kept = self.read(name)
                if kept is None or kept[1] != sizes[name]:
                    return None
                tables.append(read_header(*kept, name, budget))
        except CheckpointError:
            return None
        return joined(tables) if tables else None

    def _place(self, name: str) -> Path:
        return self.folder / f"{_digest(name.encode())[:32]}.header"

    def _read(self, path: Path, limit: int) -> bytes | None:
        try:
            with open_regular(path, str(path)) as file:
                data = file.read(limit + 1)
        except CheckpointError:
            return None
        return data if len(data) <= limit else None

    def _write(self, path: Path, data: bytes) -> None:
        """Writes a file at once: readers see the old one or the whole new one."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            partial = Path(name)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                partial.replace(path)
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
        except OSError as error:
            self.refused = error.strerror or str(error)


def _folder_name(repo: str) -> str:
    return "--".join(["models", *repo.split("/")])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        return parse_json_object(data, "")
    except CheckpointError:
        return None
