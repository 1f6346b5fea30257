"""The optional packages and environment variables that decisions depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .installed_packages import InstalledPackage, unrelated_package


@dataclass(frozen=True, slots=True)
class Packages:
    """The optional packages and environment variables that a decision depends on.

    Attributes:
        versions: version by installed package; ``""`` if unknown.
        missing: symbols (``package:dotted.name``) that installed packages lack; ``package:`` alone for one
            whose version is too old.
        env: environment variables of engines.
        remarks: sentences for the user, for example about an unrelated package with the same name; they do
            not affect decisions.

    Example:
        >>> packages = Packages({"flashinfer": "0.7.2"}, frozenset({"flashinfer:fused_moe.b12x"}))
        >>> packages.has("flashinfer"), packages.has("flashinfer", "fused_moe.b12x")
        (True, False)
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = field(default=(), compare=False)

    def has(self, package: str, symbol: str = "") -> bool:
        """True when `package` is installed in a usable version and, if given, has `symbol`."""
        absent = {f"{package}:", f"{package}:{symbol}"}
        return package in self.versions and absent.isdisjoint(self.missing)


INSTALLED = "installed"
"""Option value for the packages installed on this machine."""


def packages_of(probed: Sequence[InstalledPackage], env: Mapping[str, str]) -> Packages:
    """The `Packages` of all probed packages that are installed."""
    probed = tuple(probed)
    installed = [package for package in probed if package.present]
    return Packages(
        {package.name: package.version for package in installed},
        frozenset(f"{package.name}:{symbol}" for package in installed for symbol in package.lacks),
        env,
        tuple(unrelated_package(package) for package in probed if package.wrong),
    )
