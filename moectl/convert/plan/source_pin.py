"""The identity of a source's files: taken before a conversion reads them, and compared when it has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.source.open_checkpoint import rank_number
from ...checkpoint.source.shards import SUFFIX, read_document
from ...errors import CheckpointError
from ...files.access import Access, access_like
from ...files.folder_handle import FolderHandle, sha256_inside
from ...files.records import to_json
from ...files.safetensors_header import header_length, read_header
from ...files.strict_json import parse_json_object
from ...files.tensor_table import TensorInfo, files_of
from ..manifest.manifest_records import CONFIG, SourceFile, SourceRecord, is_plain_name
from ..stream.source_reader import FolderReader
from .conversion_plan import RESERVED, digest_of

SMALL_FILE = 64 << 20
"""Size above which files other than safetensors are not copied, in bytes."""

MOST_SMALL_FILES = 1000
"""Most of those that are copied; published checkpoints have some ten."""

SAMPLES = 64
SAMPLE_BYTES = 4096
"""`SourceFile.sample_sha256` is of this many blocks of a file's tensors, evenly spread, and bytes of each."""

READERS = 8
"""Files whose samples are read at once: over a network it is the latency that counts."""


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file from one that replaced it, and changes when it is written to.

    `modified` is in nanoseconds. The time of the last change of the inode is left out, since a link to the
    file, which is how passthrough tensors get into an output, changes it.
    """

    size: int
    modified: int
    inode: int


@dataclass(frozen=True)
class PinnedSource:
    """A checkpoint as it was when a conversion began.

    Attributes:
        folder: its directory.
        record: what the manifest says of it.
        files: identities of the files that are read or copied, by name.
        access: who may use all of these files.
    """

    folder: Path
    record: SourceRecord
    files: Mapping[str, FileIdentity]
    access: Access

    @property
    def digest(self) -> str:
        """A digest of all of it, equal if and only if nothing was written, to any of its files."""
        return digest_of([to_json(self.record.files), self.record.config_sha256, to_json(self.files)])

    def check(self) -> None:
        """Raises CheckpointError, naming files, unless all of them are what they were.

        Sizes, times and inodes are compared, headers and samples.
        """
        with FolderHandle(self.folder) as handle:
            now = {name: _status(handle, name) for name in self.files}
        changed = [n for n, status in now.items() if status is None or _identity_of(status) != self.files[n]]
        if not changed:
            found = source_files(self.folder, [file.name for file in self.record.files])
            pairs = zip(found, self.record.files, strict=True)
            changed = [file.name for file, before in pairs if file != before]
        self._refuse(changed)

    def check_open(self, reader: FolderReader) -> None:
        """Opens every file of tensors; CheckpointError unless they are the ones that were pinned.

        What is read from them later is of these files, whatever becomes of their names.
        """
        names = [file.name for file in self.record.files]
        self._refuse([n for n in names if _identity_of(os.fstat(reader.fd(n))) != self.files[n]])

    def _refuse(self, changed: list[str]) -> None:
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise CheckpointError(
                f"{', '.join(changed[:3])}{more} of {self.folder} changed after the conversion was planned.",
                reason="The output would be of two revisions.",
                hint="Convert the checkpoint as it is now into an empty directory; let nothing write to it.",
            )


def pin_source(checkpoint: Checkpoint, folder: Path) -> PinnedSource:
    """The checkpoint in `folder` as it is now.

    Raises CheckpointError unless config and headers are those of `checkpoint`, which was opened earlier.
    """
    tensor_files = files_of(checkpoint.tensors) - {""}
    with FolderHandle(folder) as handle:
        small = {path.name for path in folder.iterdir() if is_small_file(path.name, handle)}
        if len(small) > MOST_SMALL_FILES:
            raise CheckpointError(
                f"{folder} has {len(small)} files beside the weights, at most {MOST_SMALL_FILES} are copied.",
                hint="Move what does not belong to the checkpoint out of its folder.",
            )
        names = sorted(tensor_files | small | {CONFIG})
        statuses = {name: status for name in names if (status := _status(handle, name)) is not None}
        pinned = PinnedSource(
            folder,
            source_record(checkpoint, folder),
            {name: _identity_of(status) for name, status in statuses.items()},
            access_like(folder.stat(), statuses.values()),
        )
        changed = [] if read_document(folder, CONFIG) == checkpoint.config else [CONFIG]
        changed += [name for name, infos in _by_file(checkpoint) if _header(handle, name, infos) != infos]
    if changed or len(pinned.files) < len(names):
        pinned._refuse(changed or sorted(set(names) - statuses.keys()))
    return pinned


def _by_file(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, TensorInfo]]]:
    by_file: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        by_file.setdefault(info.file, {})[name] = info
    yield from sorted(by_file.items())


def _header(folder: FolderHandle, name: str, wanted: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of a file that are `wanted`, as its header describes them now."""
    with folder.file(name) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size, name)
    return {key: header[key] for key in wanted if key in header}


def _status(folder: FolderHandle, name: str) -> os.stat_result | None:
    """What the system says of a file; None if it cannot be opened."""
    try:
        return folder.status(name)
    except CheckpointError:
        return None


def _identity_of(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino)


def is_small_file(name: str, folder: FolderHandle) -> bool:
    """True for a file of a checkpoint that is no tensor file, and copied with it.

    False for directories, files over `SMALL_FILE`, safetensors, and links out of the checkpoint (the blobs of
    a Hub cache belong to it).
    """
    if not is_plain_name(name) or name.startswith(RESERVED) or name.endswith(SUFFIX):
        return False
    status = None if rank_number(Path(name)) is not None else _status(folder, name)
    return status is not None and status.st_size <= SMALL_FILE


def source_record(checkpoint: Checkpoint, folder: Path) -> SourceRecord:
    """A checkpoint's name, revision, and hashes of its config, of every header and of samples of tensors."""
    return SourceRecord(
        kind=checkpoint.origin.kind,
        name=checkpoint.origin.name.encode("utf-8", "backslashreplace").decode(),
        revision=checkpoint.origin.revision,
        config_sha256=sha256_inside(folder, CONFIG),
        files=source_files(folder, sorted(files_of(checkpoint.tensors) - {""})),
    )


def source_files(folder: Path, names: Iterable[str]) -> tuple[SourceFile, ...]:
    """Size, metadata and hashes of weight files, in the order of `names`; raises CheckpointError."""
    with FolderHandle(folder) as handle, ThreadPoolExecutor(READERS) as threads:
        return tuple(threads.map(partial(_source_file, handle), names))


def _source_file(folder: FolderHandle, name: str) -> SourceFile:
    with folder.file(name) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        raw = file.read(header_length(prefix, size, name))
        start = len(prefix) + len(raw)
        sample = hashlib.sha256()
        for first, last in sampled(start, size):
            file.seek(first)
            sample.update(file.read(last - first))
    metadata = parse_json_object(raw, f"{name}: the header").get("__metadata__", {})
    header_sha256 = hashlib.sha256(prefix + raw).hexdigest()
    return SourceFile(name, size, header_sha256, dict(metadata), sample.hexdigest())


def sampled(start: int, end: int) -> list[tuple[int, int]]:
    """The ranges of bytes, first and last (exclusive), that stand for all from `start` to `end`.

    Example:
        >>> sampled(8, 100)
        [(8, 100)]
        >>> len(sampled(0, 10**9)), sampled(0, 10**9)[-1][1]
        (64, 1000000000)
    """
    room = end - start - SAMPLE_BYTES
    if room < SAMPLES * SAMPLE_BYTES:
        return [(start, end)]
    firsts = (start + room * i // (SAMPLES - 1) for i in range(SAMPLES))
    return [(first, first + SAMPLE_BYTES) for first in firsts]
