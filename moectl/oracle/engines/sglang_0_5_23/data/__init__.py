"""Facts taken from SGLang 0.5.23 by a program."""

import json
from functools import cache
from pathlib import Path


@cache
def variables() -> frozenset[str]:
    """Every environment variable that SGLang names with its prefix."""
    return frozenset(json.loads(Path(__file__).with_name("variables.json").read_text(encoding="utf-8")))
