"""What is said of a file that was named for a command to read, and that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UsageError


def unreadable(what: str, path: Path, error: Exception, kind: str) -> UsageError:
    """The error for the file `path`, called `what`, that reading ended with `error`.

    `kind` says what it should be, as ``a safetensors file``.
    """
    return UsageError(f"cannot read {what}: {_why(path, error, kind)}", hint=f"give the path of {kind}")


def _why(path: Path, error: Exception, kind: str) -> str:
    if path.is_dir():
        return "it is a folder"
    if not os.access(path, os.F_OK):
        return "there is no such file"
    if not path.is_file():
        return "it is a pipe or device"
    if not os.access(path, os.R_OK):
        return "it may not be read by this user"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"it is not {kind}, or is damaged"
