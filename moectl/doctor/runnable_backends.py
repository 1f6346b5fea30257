"""Which backends can run on a machine, and why the others cannot, independent of any checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..environment import Device, Packages
from ..environment.installed_packages import package_folder
from ..environment.python_environments import PythonEnvironment
from ..kernels.registry import RUNNERS
from ..oracle.backend import Backend, ExpertsClass
from ..oracle.checks import Verdict, formats_on, judge_machine
from ..oracle.policy import Policy


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend on one machine.

    Attributes:
        policy, name: the backend.
        experts: its experts classes that can run.
        formats: weight formats that those classes support; empty for any.
        against: failed checks of the class that comes closest, if none can run.
        untried: moectl has a runner for it, but never checked its results on such a device.
    """

    policy: str
    name: str
    experts: tuple[str, ...]
    formats: tuple[str, ...]
    against: tuple[Verdict, ...] = ()
    untried: bool = False

    @property
    def runs(self) -> bool:
        """True if one of its classes can run."""
        return bool(self.experts)

    @property
    def elsewhere(self) -> bool:
        """True if it is for other kinds of devices."""
        return any(verdict.question == "device" for verdict in self.against)

    def to_json(self) -> dict[str, Any]:
        """The status as JSON values, with reasons as in decisions."""
        return {
            "policy": self.policy,
            "backend": self.name,
            "runs": self.runs,
            "experts": list(self.experts),
            "formats": list(self.formats),
            "verified": not self.untried,
            "reasons": [
                {"question": v.question, "wanted": v.wanted, "offered": v.offered} for v in self.against
            ],
        }


def backend_statuses(
    policy: Policy,
    device: Device,
    packages: Packages,
    libraries: Mapping[str, str],
    where: PythonEnvironment | None = None,
) -> tuple[BackendStatus, ...]:
    """Every backend of `policy` on `device`: runnable ones first, those for other devices last.

    `libraries` are the versions of other packages that are installed here, or in `where`.
    """
    merged: dict[str, list[ExpertsClass]] = {}
    lacking: dict[str, tuple[Verdict, ...]] = {}
    untried: set[str] = set()
    for backend in policy.backends():
        if backend.untried(device):
            untried.add(backend.name)
        merged.setdefault(backend.name, []).extend(backend.variants)
        lacking[backend.name] = tuple(
            Verdict(f"package {name}", "package", name, "not installed", False)
            for name in _missing(backend, libraries, where)
        )
    statuses = [
        replace(
            _status(policy.name, name, variants, device, packages, lacking[name]), untried=name in untried
        )
        for name, variants in merged.items()
    ]
    return tuple(sorted(statuses, key=lambda status: (not status.runs, status.elsewhere, status.name)))


def _missing(backend: Backend, libraries: Mapping[str, str], where: PythonEnvironment | None) -> list[str]:
    """Packages that moectl's runner of `backend` imports and that are not installed."""
    needed = RUNNERS[backend.runner].packages if backend.runner else ()
    return [name for name in needed if name not in libraries and package_folder(name, where) is None]


def _status(
    policy: str,
    name: str,
    variants: Iterable[ExpertsClass],
    device: Device,
    packages: Packages,
    lacking: tuple[Verdict, ...],
) -> BackendStatus:
    judged = [
        (variant, (*(v for v in judge_machine(device, packages, variant) if not v.holds), *lacking))
        for variant in variants
    ]
    runnable = [variant for variant, against in judged if not against]
    if not runnable:
        nearest = min((against for _, against in judged), key=_distance)
        return BackendStatus(policy, name, (), (), nearest)
    formats: set[str] = set()
    for variant in runnable:
        formats |= formats_on(device, variant.capability)
    return BackendStatus(
        policy, name, tuple(dict.fromkeys(v.experts for v in runnable)), tuple(sorted(formats))
    )


def _distance(against: tuple[Verdict, ...]) -> tuple[bool, int]:
    """Sort key for how far a class is from running: first by device, then by number of failed checks."""
    return any(verdict.question == "device" for verdict in against), len(against)
