"""The manifest document of a directory, which is read only if READY holds its hash."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.folder_handle import read_inside
from ...files.strict_json import parse_document, shown
from ..worker_partition import partitions_in
from .manifest_records import LOG, MANIFEST, READABLE_VERSIONS, READY, REPORT, ready_bytes

LONGEST_MANIFEST = 1 << 29

LONGEST_LIST = 1 << 16
"""Most layers, files or ranks in a document about a directory; each costs a look at the disk."""


def signed_document(folder: Path) -> dict[str, Any]:
    """The manifest document of the complete directory `folder`, of a version that this program reads.

    Raises CheckpointError if there is none, READY is missing or does not hold its hash, or it is of another
    version.
    """
    data = read_small(folder, MANIFEST, LONGEST_MANIFEST)
    ready = read_small(folder, READY, 1 << 10)
    if data is None or ready is None:
        raise _incomplete(folder, data is not None, ready is not None)
    if ready != ready_bytes(data):
        raise CheckpointError(
            f"{READY} does not hold the SHA-256 of {MANIFEST}: one of them was changed.",
            hint="Convert again.",
        )
    return versioned_document(data, MANIFEST)


def versioned_document(data: bytes, where: str) -> dict[str, Any]:
    """The manifest document `data`; CheckpointError if it is of a version that this program cannot read."""
    document = parse_document(data, where)
    version = document.get("format_version")
    if version not in READABLE_VERSIONS:
        raise CheckpointError(
            f"{where} has format version {version!r}, this program reads "
            f"{' and '.join(map(str, READABLE_VERSIONS))}.",
            hint="Use the program that wrote it, or convert again.",
        )
    refuse_long_lists(document, where)
    return document


def refuse_long_lists(document: Mapping[str, Any], where: str) -> None:
    """CheckpointError when a field of a manifest or report lists more than `LONGEST_LIST` things."""
    for name, value in document.items():
        if isinstance(value, list) and len(value) > LONGEST_LIST:
            raise CheckpointError(
                f"{where} lists {len(value)} {shown(name)}, expected at most {LONGEST_LIST}.",
                hint="Convert again.",
            )


def read_small(folder: Path, name: str, limit: int) -> bytes | None:
    """The bytes of a file of `folder`, at most `limit`; None if there is no such file."""
    if not os.path.lexists(folder / name):
        return None
    return read_inside(folder, name, limit, str(folder / name))


def _incomplete(folder: Path, has_manifest: bool, has_ready: bool) -> CheckpointError:
    if not folder.is_dir():
        return CheckpointError(f"there is no directory {folder}.", hint="Check the path.")
    has_log = (folder / LOG).exists()
    if not has_manifest and (folder / REPORT).exists():
        return CheckpointError(
            f"{folder} is a portable checkpoint, from which the source cannot be restored.",
            hint="Convert from the source again where another format is wanted.",
        )
    if not has_manifest and not has_ready:
        return CheckpointError(
            f"{folder} is not a finished converted directory: {MANIFEST} and {READY} are missing.",
            hint="Complete it with convert --finish."
            if partitions_in(folder) or any(folder.glob(f"rank-*/{MANIFEST}"))
            else "Finish it with convert --resume."
            if has_log
            else "Give a directory that convert has written.",
        )
    missing = READY if has_manifest else MANIFEST
    return CheckpointError(
        f"{folder} is not complete: {missing} is missing.",
        reason=f"{READY} is written last, when everything else is there.",
        hint="Finish it with convert --resume." if has_log else "Convert again into an empty directory.",
    )
