"""The user's cache directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ..files.user_paths import home_folder, user_path

VARIABLE = "MOECTL_CACHE"
"""Environment variable that overrides the platform's cache directory."""


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """The user's cache directory: `VARIABLE`, else ``moectl`` in the platform's cache directory."""
    env = os.environ if env is None else env
    if named := env.get(VARIABLE):
        return user_path(named)
    home = home_folder(env)
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "moectl"
    return Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "moectl"
