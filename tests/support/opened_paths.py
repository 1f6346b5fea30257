"""What a call of `os.open` opens, for tests that put something in its place."""

from __future__ import annotations

from pathlib import Path


def opened_path(path: str | Path, dir_fd: int | None = None) -> Path:
    """The absolute path of a file that is opened, perhaps relative to the descriptor of a folder.

    Example:
        >>> opened_path("/a/b")
        PosixPath('/a/b')
    """
    return (Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()) / path
