"""Packages and environment variables for a decision: what is installed, or what is assumed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..capabilities.unpacked_libraries import find_peers, peers_folder
from ..environment.installed_packages import distribution_version, find_all, package_folder
from ..environment.package_probes import TOOLS
from ..environment.packages import INSTALLED, Packages, packages_of
from ..environment.python_environments import PythonEnvironment
from ..errors import UsageError
from .engine import Engine
from .registry import answering_engines, engine_named, engine_variables, known_packages, newest_engines


def profile_engine(engine: Engine) -> Engine:
    """`engine`, or the default one if it has no profiles."""
    return engine if engine.profiles() else engine_named()


def default_profile(platform: str, engine: Engine) -> str:
    """Profile of a named device: the engine's default installation on `platform`."""
    return profile_engine(engine).default_profiles.get(platform, "none")


def packages_from(
    spec: str | None,
    env: Mapping[str, str] | None = None,
    engine: Engine | None = None,
    where: PythonEnvironment | None = None,
) -> Packages:
    """Packages and environment variables for a decision; `env` adds or replaces variables.

    None means what is installed here, or in the environment `where`, detected without imports, and this
    process's engine variables. Otherwise `spec` is a comma-separated list of packages such as ``flashinfer``
    or ``humming=0.1.19``, profiles of `engine` (``full``, ``bare``, ...) and ``installed``; ``none`` is no
    package. Listed packages are assumed complete, unless the stated version is older than `Probe.oldest`.

    Raises UsageError for an unknown name, and for what is no version.

    Example:
        >>> packages_from("humming=0.1.19").versions
        {'humming': '0.1.19'}
        >>> packages_from("flashinfer=0.1.0").has("flashinfer")
        False
    """
    owner = profile_engine(engine or engine_named())
    profiles = owner.profiles()
    versions: dict[str, str] = {}
    missing: set[str] = set()
    switches: dict[str, str] = {}
    remarks: tuple[str, ...] = ()
    listed = []
    for item in (INSTALLED if spec is None else spec).split(","):
        name, _, version = (part.strip() for part in item.partition("="))
        if name == INSTALLED:
            installed = installed_packages({}, where)
            versions |= installed.versions
            missing |= installed.missing
            remarks = installed.remarks
            switches |= engine_variables(os.environ)
        elif name in profiles:
            versions |= dict.fromkeys(profiles[name].packages, "")
            switches |= profiles[name].env
        elif name != "none":
            listed.append((name.replace("-", "_"), version))
    probes = known_packages() if listed else {}
    for name, version in listed:
        if name not in probes and name not in TOOLS:
            raise UsageError(
                f"there is no package or profile {name!r} for --packages",
                hint=f"Packages: {', '.join((*probes, *TOOLS))}. Profiles of {owner.title}: "
                f"{', '.join(profiles)}; none is no package.",
            )
        if version and not version[0].isdigit():
            raise UsageError(
                f"--packages takes a version such as {name}=1.2.3, got {version!r}",
                hint=f"state {name} alone for the version that is needed",
            )
        versions[name] = version
        missing = {symbol for symbol in missing if not symbol.startswith(f"{name}:")}
        if name in probes and probes[name].too_old(version):
            missing.add(f"{name}:")
        remarks = tuple(remark for remark in remarks if not remark.startswith(f"{name} "))
        if name == "flashinfer":
            versions.setdefault("flashinfer_cubin", "")
    return Packages(versions, frozenset(missing), switches | dict(env or {}), remarks)


def installed_packages(env: Mapping[str, str], where: PythonEnvironment | None = None) -> Packages:
    """What is installed or unpacked here, or installed in `where`, detected without imports, and `env`.

    Unpacked libraries have separate names, as no engine imports them.
    """
    peers = find_peers(peers_folder()) if where is None else ()
    return packages_of((*find_all(known_packages(), where), *peers), env)


def packages_of_rules(engine: Engine) -> Packages:
    """What is installed or unpacked here of the packages that the rules of `engine` check, and all variables.

    Its decisions are those with `packages_from(None)`, which has the rules of all engines made.
    """
    return packages_of((*find_all(engine.packages), *find_peers(peers_folder())), dict(os.environ))


def default_engine(where: PythonEnvironment | None = None) -> Engine:
    """The default engine in the release that is installed here, or in `where`; see `installed_release`."""
    return installed_release(engine_named(), where)


def installed_release(newest: Engine, where: PythonEnvironment | None = None) -> Engine:
    """The engine of the family of `newest` in the release that is installed here, or in `where`.

    `newest` itself if none is installed, or if that release is older than every known one, or unknown.
    """
    version = distribution_version(newest.package, newest.package, where) if newest.package else ""
    try:
        return engine_named(f"{newest.family}=={version}") if version else newest
    except UsageError:
        return newest


def engines_of_families(where: PythonEnvironment | None = None) -> tuple[Engine, ...]:
    """One engine of each family, in the release that is installed here, or in `where`; else the newest."""
    return tuple(installed_release(engine, where) for engine in newest_engines())


def present_engines(where: PythonEnvironment | None = None) -> tuple[Engine, ...]:
    """The engines that answer without being named; the default one as `default_engine` finds it here, or in
    `where`."""
    default = default_engine(where)
    return tuple(default if engine.family == default.family else engine for engine in answering_engines())


def installed_version(engine: Engine, where: PythonEnvironment | None = None) -> str | None:
    """The version of the engine that is installed here, or in `where`: ``""`` if unknown; None without it."""
    version = distribution_version(engine.package, engine.package, where)
    return version or ("" if package_folder(engine.package, where) else None)
