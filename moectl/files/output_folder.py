"""Checks of a command's output folder before work begins, and its removal when the work fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import Unavailable, UsageError
from .atomic import disk_errors


def refuse_inside(source: Path, out: Path) -> None:
    """UsageError when `out` is `source` or lies in it, or is a file."""
    home, target = source.resolve(), out.resolve()
    if target == home or home in target.parents:
        raise UsageError(
            f"the output {out} lies in {source}, which is never written to.",
            hint="Choose a folder outside of it.",
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"the output {out} is a file.", hint="Choose a folder.")


def create_folder(folder: Path) -> None:
    """Creates `folder` and its parents; Unavailable when the system refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot create {folder}: {error.strerror or error}.") from error


def refuse_filled(out: Path) -> None:
    """UsageError when `out` is anything but an empty folder or nothing at all."""
    with disk_errors(out, 0):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is not an empty folder.", hint="Give a new folder, or remove this one.")


@contextmanager
def all_or_none(out: Path, names: Iterable[str]) -> Iterator[None]:
    """Creates the folder `out` for the block to write `names` in; on any error all of it goes again."""
    with disk_errors(out, 0):
        made = [place for place in (out, *out.parents) if not place.exists()]
    try:
        create_folder(out)
        yield
    except BaseException:
        for name in names:
            with suppress(OSError):
                (out / name).unlink()
        for place in made:
            with suppress(OSError):
                place.rmdir()
        raise


def refuse_small_disk(out: Path, needed: int, hint: str) -> None:
    """Unavailable when `out`'s file system cannot take `needed` bytes, what `out` holds already included."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    held = sum(path.lstat().st_size for path in out.iterdir()) if out.is_dir() else 0
    room = shutil.disk_usage(place).free + held
    if room < needed:
        raise Unavailable(f"{needed} bytes of disk are needed, {out} has room for {room}.", hint=hint)
