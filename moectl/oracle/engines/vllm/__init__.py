"""vLLM's releases: the newest in full, each older one as its difference from the next."""

from dataclasses import replace
from importlib import import_module

from ...engine import Engine
from .reports import REPORTS

NEWEST = "0.33.0"


def engine(version: str) -> Engine:
    """vLLM `version`, made of the rules of the releases from there to the newest, which are imported now."""
    above, name = ("..", f"vllm_{version}") if version == NEWEST else (".", f"v{version}")
    module = import_module(f"{above}{name.replace('.', '_')}", __package__)
    made: Engine = getattr(module, f"VLLM_{version.replace('.', '_')}")
    return replace(made, reports=REPORTS)
