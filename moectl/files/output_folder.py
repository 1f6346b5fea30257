"""Checks of an output directory before the work begins, and its removal when the work fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import Unavailable, UsageError
from .access import BY_UMASK, Access
from .atomic import disk_errors, sync_folder
from .sizes import size


def refuse_inside(source: Path, out: Path) -> None:
    """UsageError when `out` is `source`, inside of it, or a file."""
    home, target = source.resolve(), out.resolve()
    if target == home:
        raise UsageError(
            f"the output {out} is the source directory itself, which is never written to.",
            hint="Choose another folder.",
        )
    if home in target.parents:
        raise UsageError(
            f"the output {out} is inside {source}, which is never written to.",
            hint="Choose a folder outside of it.",
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"the output {out} is a file.", hint="Choose a folder.")


def create_folder(folder: Path, access: Access = BY_UMASK) -> None:
    """Creates `folder` and the parents that it lacks, durably, with `access`.

    Unavailable when the system refuses.
    """
    try:
        for each in (*reversed(folder.parents), folder):
            if not each.is_dir():
                each.mkdir(access.of_folder(each.parent), exist_ok=True)
                with suppress(PermissionError):  # a folder in which one may write, but which one may not read
                    sync_folder(each.parent)
    except OSError as error:
        raise Unavailable(
            f"cannot create {folder}: {error.strerror or error}.", hint="Choose another output folder."
        ) from error


def refuse_filled(out: Path) -> None:
    """UsageError unless `out` is an empty directory or does not exist."""
    with disk_errors(out, 0):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is not an empty folder.", hint="Give a new folder, or remove this one.")


@contextmanager
def new_folder(out: Path, access: Access = BY_UMASK) -> Iterator[None]:
    """Creates `out` and its parents; on an error those that were created are removed if empty."""
    with disk_errors(out, 0):
        created = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        create_folder(out, access)
        yield
    except BaseException:
        for folder in created:
            with suppress(OSError):
                folder.rmdir()
        raise


def refuse_small_disk(out: Path, needed: int, hint: str, counted: str = "") -> None:
    """Unavailable when the file system has no room for `needed` bytes, counting files in `out` as free.

    `counted` is a sentence on what they are, unless that is plain.
    """
    existing = out.absolute()
    while not existing.exists():
        existing = existing.parent
    replaceable = sum(path.lstat().st_size for path in out.iterdir()) if out.is_dir() else 0
    room = shutil.disk_usage(existing).free + replaceable
    if room < needed:
        raise Unavailable(
            f"{size(needed)} of disk are needed, {out} has room for {size(room)}.", reason=counted, hint=hint
        )
