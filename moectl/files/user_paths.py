"""Paths that begin with a user's home directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import UsageError


def user_path(path: str | Path) -> Path:
    """`path` with a leading ``~`` or ``~NAME`` replaced; UsageError if that user has no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"the path {str(path)!r} names the home directory of a user who has none",
            hint="give the whole path",
        ) from error


def home_folder(env: Mapping[str, str] | None = None) -> Path:
    """HOME of `env` (the process's by default), else what the system knows; UsageError if it knows none."""
    env = os.environ if env is None else env
    try:
        return Path(env.get("HOME") or Path.home())
    except RuntimeError as error:
        raise UsageError("this user has no home directory", hint="set HOME to one") from error
