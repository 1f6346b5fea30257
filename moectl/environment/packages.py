"""Installed packages and engine switches as a value that decisions depend on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .devices import DATA
from .installed import find_all
from .probes import PROBES, TOOLS

PROFILES_FILE = DATA / "vllm-0.33.0-grid.json"
"""Recorded names of the vLLM 0.33.0 policy; its package profiles are offered by name."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Optional packages and switches that a decision depends on.

    `versions` maps an importable package to its version (``""`` when unknown); `missing` lists
    symbols (``package:dotted.name``) that an installed package lacks; `env` holds engine switches.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)

    def has(self, package: str, symbol: str = "") -> bool:
        """True when `package` is installed and, if named, holds `symbol`."""
        return package in self.versions and f"{package}:{symbol}" not in self.missing


def packages_from(spec: str | None, env: Mapping[str, str] | None = None) -> Packages:
    """Packages and switches that a decision may count on; `env` adds or replaces switches.

    None is what is installed here, found without importing it, and this process's ``VLLM_*``
    variables. Otherwise `spec` is the name of a profile (``full``, ``bare``, ...) or a list such as
    ``flashinfer,humming=0.1.19``; listed packages count as complete, and ``none`` is no package.

    UsageError when a name is neither.
    """
    switches = dict(env or {})
    if spec is None:
        mine = {key: value for key, value in os.environ.items() if key.startswith("VLLM_")}
        return installed_packages({**mine, **switches})
    profiles: dict[str, Any] = json.loads(PROFILES_FILE.read_text(encoding="utf-8"))["PROFILES"]
    if profile := profiles.get(spec.strip()):
        return Packages(dict.fromkeys(profile["packages"], ""), env={**profile["env"], **switches})
    versions = {}
    for item in spec.split(","):
        name, _, version = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if name in ("", "none"):
            continue
        if name not in PROBES and name not in TOOLS:
            raise UsageError(
                f"{name!r} is neither a package that decides nor a profile",
                hint=f"Packages: {', '.join((*PROBES, *TOOLS))}. Profiles: {', '.join(profiles)}.",
            )
        versions[name] = version
    if "flashinfer" in versions:
        versions.setdefault("flashinfer_cubin", "")
    return Packages(versions, env=switches)


def installed_packages(env: Mapping[str, str]) -> Packages:
    """What is installed here and counts, found without importing it, with the switches `env`."""
    there = [found for found in find_all() if found.present]
    return Packages(
        {found.name: found.version for found in there},
        frozenset(f"{found.name}:{symbol}" for found in there for symbol in found.lacks),
        env,
    )
