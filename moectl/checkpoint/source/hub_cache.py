"""Safetensors headers of Hub checkpoints, cached by commit.

They are stored in the Hub client's directory for files of other libraries,
``$HF_HOME/assets/moectl/models--ORG--NAME/COMMIT`` (or ``$HF_ASSETS_CACHE``). A commit never changes, so
entries do not expire; an entry whose checksum is wrong is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.atomic import replace_file
from ...files.safe_reading import open_regular
from ...files.safetensors_header import HEADER_LIMIT, LENGTH_BYTES, Budget, read_header
from ...files.strict_json import parse_json_object
from ...files.tensor_table import TensorTable, joined
from ...files.user_paths import home_folder, user_path
from .shards import index_files, shard_names

LIBRARY = "moectl"
LISTING = "files.json"
"""Sizes of all weight files; written once all their headers are cached."""

RECORD_LIMIT = 4096
"""Maximum length of the first line of a cached header, which has the file's name, size and checksum."""


class HeaderCache:
    """The cached headers of `repo` at `commit`; reading creates no files.

    `refused` is the system's reason if something could not be written, which only affects speed.
    """

    def __init__(self, repo: str, commit: str) -> None:
        from huggingface_hub import constants

        self.folder = Path(constants.HF_ASSETS_CACHE).expanduser() / LIBRARY / _folder_name(repo) / commit
        self.refused = ""

    def read(self, name: str) -> tuple[bytes, int] | None:
        """Weight file `name` up to the end of its header, and the file's size; None if not cached."""
        data = self._read(self._path(name), RECORD_LIMIT + LENGTH_BYTES + HEADER_LIMIT)
        line, _, start = (data or b"").partition(b"\n")
        record = _object(line)
        if record is None or record.get("file") != name or record.get("sha256") != _digest(start):
            return None
        size = record.get("size")
        return (start, size) if isinstance(size, int) and not isinstance(size, bool) else None

    def write(self, name: str, start: bytes, size: int) -> None:
        """Caches `start`, weight file `name` up to the end of its header; the file has `size` bytes."""
        record = {"file": name, "size": size, "sha256": _digest(start)}
        self._write(self._path(name), json.dumps(record).encode() + b"\n" + start)

    def write_listing(self, sizes: Mapping[str, int]) -> None:
        """Records that the headers of all weight files are cached, with the files' sizes."""
        self._write(self.folder / LISTING, json.dumps(dict(sorted(sizes.items()))).encode())

    def tensors(self, index: Mapping[str, Any] | None) -> TensorTable | None:
        """Every tensor of the checkpoint with this `index`; None unless all its headers are cached."""
        sizes = _object(self._read(self.folder / LISTING, HEADER_LIMIT) or b"")
        if sizes is None:
            return None
        tables, budget = [], Budget()
        try:
            for name in shard_names(sizes, None if index is None else index_files(index)):
                cached = self.read(name)
                if cached is None or cached[1] != sizes[name]:
                    return None
                tables.append(read_header(*cached, name, budget))
        except CheckpointError:
            return None
        return joined(tables) if tables else None

    def _path(self, name: str) -> Path:
        return self.folder / f"{_digest(name.encode())[:32]}.header"

    def _read(self, path: Path, limit: int) -> bytes | None:
        try:
            with open_regular(path, str(path)) as file:
                data = file.read(limit + 1)
        except CheckpointError:
            return None
        return data if len(data) <= limit else None

    def _write(self, path: Path, data: bytes) -> None:
        """Replaces a file atomically: readers see the old or the new contents."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)
        except OSError as error:
            self.refused = error.strerror or str(error)


def may_be_cached(repo: str) -> bool:
    """False when the Hub's cache has nothing of `repo`; found without importing the Hub's client."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or home)
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    return (user_path(cache) / _folder_name(repo)).is_dir()


def _folder_name(repo: str) -> str:
    return "--".join(["models", *repo.split("/")])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        return parse_json_object(data, "")
    except CheckpointError:
        return None
