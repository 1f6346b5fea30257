"""Installed packages and engine switches as a value that decisions depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .installed_packages import InstalledPackage, another_of_the_name


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


def packages_of(found: Sequence[InstalledPackage], env: Mapping[str, str]) -> Packages:
    """What of `found` is there, as decisions count on it, and `env`."""
    found = tuple(found)
    there = [one for one in found if one.present]
    return Packages(
        {one.name: one.version for one in there},
        frozenset(f"{one.name}:{symbol}" for one in there for symbol in one.lacks),
        env,
        tuple(another_of_the_name(one) for one in found if one.wrong),
    )
