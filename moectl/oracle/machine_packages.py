"""Packages and environment variables that a decision may count on: what is installed, or what is assumed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..capabilities.unpacked_libraries import find_peers, peers_folder
from ..environment.installed_packages import find_all
from ..environment.package_probes import TOOLS
from ..environment.packages import INSTALLED, Packages, packages_of
from ..errors import UsageError
from .engine import Engine
from .registry import engine_named, engine_variables, known_packages


def profile_engine(engine: Engine) -> Engine:
    """`engine`, or the default one where it names no profiles of its own."""
    return engine if engine.profiles() else engine_named()


def default_profile(platform: str, engine: Engine) -> str:
    """Packages that a named device is assumed to have: the engine's default installation there."""
    return profile_engine(engine).default_profiles.get(platform, "none")


def packages_from(
    spec: str | None, env: Mapping[str, str] | None = None, engine: Engine | None = None
) -> Packages:
    """Packages and switches that a decision may count on; `env` adds or replaces switches.

    None is what is installed here, found without importing it, and this process's variables of any
    engine. Otherwise `spec` is a list: packages such as ``flashinfer`` or ``humming=0.1.19``, which
    then count as complete, profiles of `engine` (``full``, ``bare``, ...) for what each holds, and
    ``installed`` for what is here; ``none`` is no package.

    UsageError when a name is none of these.
    """
    profiles, known = profile_engine(engine or engine_named()).profiles(), known_packages()
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
            switches |= engine_variables(os.environ)
        elif name in profiles:
            versions |= dict.fromkeys(profiles[name].packages, "")
            switches |= profiles[name].env
        elif name != "none":
            listed.append((name.replace("-", "_"), version))
    for name, version in listed:
        if name not in known and name not in TOOLS:
            raise UsageError(
                f"no package that decides and no profile is called {name!r}",
                hint=f"Packages: {', '.join((*known, *TOOLS))}. Profiles: {', '.join(profiles)}.",
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
    return packages_of((*find_all(known_packages()), *find_peers(peers_folder())), env)
