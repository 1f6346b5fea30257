"""Installed packages and engine switches as a value that decisions depend on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .devices import DATA
from .installed import Installed, another_of_the_name, find_all
from .peers import find_peers, peers_folder
from .probes import PROBES, TOOLS

PROFILES_FILE = DATA / "vllm-0.33.0-grid.json"
"""Recorded names of the vLLM 0.33.0 policy; its package profiles are offered by name."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Optional packages and switches that a decision depends on.

    `versions` maps an importable package to its version (``""`` when unknown); `missing` lists
    symbols (``package:dotted.name``) that an installed package lacks; `env` holds engine switches.
    `remarks` are sentences for a person, such as that a package is another one of the name: they decide
    nothing.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = field(default=(), compare=False)

    def has(self, package: str, symbol: str = "") -> bool:
        """True when `package` is installed and, if named, holds `symbol`."""
        return package in self.versions and f"{package}:{symbol}" not in self.missing


INSTALLED = "installed"
"""What packages are called when this machine's own are meant."""


def packages_from(spec: str | None, env: Mapping[str, str] | None = None) -> Packages:
    """Packages and switches that a decision may count on; `env` adds or replaces switches.

    None is what is installed here, found without importing it, and this process's ``VLLM_*``
    variables. Otherwise `spec` is a list: packages such as ``flashinfer`` or ``humming=0.1.19``, which
    then count as complete, profiles (``full``, ``bare``, ...) for what each holds, and ``installed`` for
    what is here; ``none`` is no package.

    UsageError when a name is none of these.
    """
    profiles: dict[str, Any] = json.loads(PROFILES_FILE.read_text(encoding="utf-8"))["PROFILES"]
    versions: dict[str, str] = {}
    missing: set[str] = set()
    switches: dict[str, str] = {}
    remarks: tuple[str, ...] = ()
    listed = []
    for item in (INSTALLED if spec is None else spec).split(","):
        name, _, version = (part.strip() for part in item.partition("="))
        if name == INSTALLED:
            here = installed_packages({})
            versions |= here.versions
            missing |= here.missing
            remarks = here.remarks
            switches |= {key: value for key, value in os.environ.items() if key.startswith("VLLM_")}
        elif name in profiles:
            versions |= dict.fromkeys(profiles[name]["packages"], "")
            switches |= profiles[name]["env"]
        elif name != "none":
            listed.append((name.replace("-", "_"), version))
    for name, version in listed:
        if name not in PROBES and name not in TOOLS:
            raise UsageError(
                f"no package that decides and no profile is called {name!r}",
                hint=f"Packages: {', '.join((*PROBES, *TOOLS))}. Profiles: {', '.join(profiles)}.",
            )
        versions[name] = version
        missing = {symbol for symbol in missing if not symbol.startswith(f"{name}:")}
        remarks = tuple(remark for remark in remarks if not remark.startswith(f"{name} "))
        if name == "flashinfer":
            versions.setdefault("flashinfer_cubin", "")
    return Packages(versions, frozenset(missing), switches | dict(env or {}), remarks)


def installed_packages(env: Mapping[str, str]) -> Packages:
    """What is installed here or in the folder of unpacked libraries, found without importing it, and `env`.

    Those of the folder have names of their own, as no engine sees them.
    """
    return packages_of((*find_all(), *find_peers(peers_folder())), env)


def packages_of(found: Sequence[Installed], env: Mapping[str, str]) -> Packages:
    """What of `found` is there, as decisions count on it, and `env`."""
    found = tuple(found)
    there = [one for one in found if one.present]
    return Packages(
        {one.name: one.version for one in there},
        frozenset(f"{one.name}:{symbol}" for one in there for symbol in one.lacks),
        env,
        tuple(another_of_the_name(one) for one in found if one.wrong),
    )
