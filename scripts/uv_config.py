"""Prints a uv.toml that has uv take packages from where pip takes them; uv reads none of pip's settings."""

import json
import re
import subprocess
import sys

KEYS = {"find-links": "find-links", "index-url": "index-url", "extra-index-url": "extra-index-url"}
"""Settings of pip, and what uv calls them."""


def pip_settings() -> dict[str, str]:
    """What pip's configuration files and PIP_ variables say; a variable comes before a file."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [
        match for line in lines if (match := re.fullmatch(r"(:env:|global|install)\.([\w-]+)='(.*)'", line))
    ]
    found.sort(key=lambda match: match[1] == ":env:")
    return {match[2]: match[3] for match in found}


def config() -> str:
    """The settings as TOML. Indexes are equals, as they are for pip."""
    settings = pip_settings()
    lines = ['index-strategy = "unsafe-best-match"', "system-certs = true"]
    for pip_name, uv_name in KEYS.items():
        values = settings.get(pip_name, "").split()
        if values:
            lines.append(f"{uv_name} = {json.dumps(values[0] if uv_name == 'index-url' else values)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(config(), end="")
