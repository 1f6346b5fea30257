"""Checks of output paths, so that no input and no file of a checkpoint is overwritten."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import Unavailable, UsageError

CHECKPOINT_SUFFIXES = (".safetensors", ".json")
"""Suffixes of files that readers take as part of the checkpoint in the same directory."""


def check_writable(path: Path, reads: Iterable[str | Path] = (), *, journal: bool = False) -> None:
    """Raises if a file must not or cannot be written to `path`, before any work is done.

    `reads` are the files and checkpoint directories that the command reads; other names are ignored. A
    `journal` may be in any directory, since it is never overwritten unless it is empty.

    Raises:
        UsageError: it would overwrite one of `reads`, or replace or add to the files of a checkpoint.
        Unavailable: the system does not allow it.
    """
    folder = path.parent
    if path.is_dir():
        raise Unavailable(f"cannot write {path}: it is a directory", hint="give the name of a file")
    if path.exists() and not path.is_file():
        raise Unavailable(f"cannot write {path}: it is a pipe or device", hint="give the name of a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise Unavailable(
            f"cannot write {path}: {folder} is not a writable directory",
            hint="choose another output path",
        )
    check_not_read(path, reads, journal=journal)


def check_not_read(path: Path, reads: Iterable[str | Path] = (), *, journal: bool = False) -> None:
    """Raises the UsageErrors of `check_writable`; for outputs whose directory may not exist yet."""
    candidates = [Path(read).expanduser() for read in reads]
    existing = [read for read in candidates if os.access(read, os.F_OK)]
    for read in existing:
        if read.is_file() and (_real(path) == _real(read) or _same(path, read)):
            raise UsageError(
                f"cannot write {path}: this command reads it", hint="give the output another name"
            )
    if journal:
        return
    owner = _owner(
        path, [read.parent if read.is_file() else read for read in existing if _is_checkpoint(read)]
    )
    if owner is not None:
        what = (
            "it exists already" if path.exists() else f"its reader takes every *{path.suffix} as part of it"
        )
        raise UsageError(
            f"cannot write {path}: {owner} is the directory of a checkpoint, and {what}",
            hint="write it to another directory",
        )


def _same(path: Path, read: Path) -> bool:
    """Whether both names are links to the same file."""
    return path.exists() and path.samefile(read)


def _is_checkpoint(read: Path) -> bool:
    """Whether `read` is a directory, or a file that marks a checkpoint's directory."""
    return read.is_dir() or read.name in _marks()


def _owner(path: Path, folders: Iterable[Path]) -> Path | None:
    """The checkpoint directory, or one of `folders`, whose file `path` is or would become; or None."""
    for folder in _folders(path):
        claimed = path.exists() or path.suffix.lower() in CHECKPOINT_SUFFIXES
        if claimed and any((folder / mark).exists() for mark in _marks()):
            return folder
        if path.exists():
            inside = {folder, *folder.parents}
            owner = next((candidate for candidate in folders if _real(candidate) in inside), None)
            if owner is not None:
                return owner
    return None


def _folders(path: Path) -> Iterator[Path]:
    """The directory of the name `path`, and that of the file it links to."""
    yield _real(path.parent)
    yield _real(path).parent


def _real(path: Path) -> Path:
    """`path` without links; unlike `Path.resolve`, circular links are not an error."""
    return Path(os.path.realpath(path))


def _marks() -> tuple[str, ...]:
    """Files that mark a directory as a checkpoint or a converted one."""
    from ..checkpoint.source.open_checkpoint import MANIFEST
    from ..checkpoint.source.shards import CONFIG, INDEX

    return (CONFIG, INDEX, MANIFEST)
