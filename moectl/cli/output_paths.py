"""Where a command may write a file: nothing that is read, and nothing of a checkpoint, is lost by it."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import Unavailable, UsageError

OF_CHECKPOINTS = (".safetensors", ".json")
"""Suffixes of files that a folder's reader takes for the checkpoint's own, new ones too."""


def check_writable(path: Path, reads: Iterable[str | Path] = (), *, journal: bool = False) -> None:
    """Raises when a file must not or cannot be written to `path`: before the work, not after it.

    `reads` are files and checkpoint folders that the command reads; names of neither do not count. A
    `journal` is never written over where it has something in it, and may lie anywhere.

    Raises:
        UsageError: it would write over one of `reads`, or over or among a checkpoint's files.
        Unavailable: the system would not let it be written.
    """
    folder = path.parent
    if path.is_dir():
        raise Unavailable(f"cannot write {path}: it is a folder", hint="give the name of a file")
    if path.exists() and not path.is_file():
        raise Unavailable(f"cannot write {path}: it is a pipe or device", hint="give the name of a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise Unavailable(
            f"cannot write {path}: {folder} is not a folder that can be written to",
            hint="choose another place for the output",
        )
    check_spared(path, reads, journal=journal)


def check_spared(path: Path, reads: Iterable[str | Path] = (), *, journal: bool = False) -> None:
    """The UsageError of `check_writable` alone, for outputs whose folder may still be made."""
    there = [Path(read).expanduser() for read in reads]
    there = [read for read in there if os.access(read, os.F_OK)]
    for read in there:
        if read.is_file() and (_real(path) == _real(read) or _same(path, read)):
            raise UsageError(
                f"cannot write {path}: this command reads it", hint="give the output another name"
            )
    if journal:
        return
    owner = _owner(path, [read.parent if read.is_file() else read for read in there if _holds(read)])
    if owner is not None:
        what = (
            "it is there already" if path.exists() else f"its reader takes every *{path.suffix} for its own"
        )
        raise UsageError(
            f"cannot write {path}: {owner} is the folder of a checkpoint, and {what}",
            hint="write it to a folder of its own",
        )


def _same(path: Path, read: Path) -> bool:
    """Whether both are one file, by whatever links."""
    return path.exists() and path.samefile(read)


def _holds(read: Path) -> bool:
    """Whether `read` is a checkpoint's folder, or a file that names one."""
    return read.is_dir() or read.name in _marks()


def _owner(path: Path, folders: Iterable[Path]) -> Path | None:
    """The folder that `path` is a file of: of a checkpoint, or below one of `folders` and there already."""
    for folder in _folders(path):
        taken = path.exists() or path.suffix.lower() in OF_CHECKPOINTS
        if taken and any((folder / mark).exists() for mark in _marks()):
            return folder
        if path.exists():
            inside = {folder, *folder.parents}
            found = next((it for it in folders if _real(it) in inside), None)
            if found is not None:
                return found
    return None


def _folders(path: Path) -> Iterator[Path]:
    """The folder of the name `path`, and that of the file behind its links."""
    yield _real(path.parent)
    yield _real(path).parent


def _real(path: Path) -> Path:
    """`path` without links; unlike `Path.resolve`, links in a circle are no error."""
    return Path(os.path.realpath(path))


def _marks() -> tuple[str, ...]:
    """Files by which a folder is known as a checkpoint's or a converted one."""
    from ..checkpoint.source.open_checkpoint import MANIFEST
    from ..checkpoint.source.shards import CONFIG, INDEX

    return (CONFIG, INDEX, MANIFEST)
