"""What was measured of a layer on a device, as an explanation shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..cache import launches, measurements
from ..environment import Device, Packages
from ..files.records import to_json
from ..measured import Measured
from ..problem import MoEProblem


@dataclass(frozen=True)
class Evidence:
    """Measurements of one layer on one device.

    Attributes:
        measured: times of backends, as `moectl bench --save` keeps them.
        tuned: the launches that `moectl tune` found for moectl's own kernels.
        notes: files of the cache that are not used, and why.
    """

    measured: Measured = field(default_factory=Measured)
    tuned: tuple[launches.Row, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rows": self.measured.to_json(),
            "tuned": to_json(self.tuned),
            "notes": list(self.notes),
        }


Known = Callable[[Device, MoEProblem, Packages], Evidence]


def nothing(device: Device, problem: MoEProblem, packages: Packages) -> Evidence:
    """No evidence: the choice is the policy's order alone."""
    return Evidence()


def cached(device: Device, problem: MoEProblem, packages: Packages) -> Evidence:
    """What this user's cache has of a layer on a device, with the versions of `packages` where known."""
    times = measurements.known(device, problem, packages.versions)
    rows, note = launches.rows_of(problem, device)
    return Evidence(times.measured, rows, (*times.notes, *([note] if note else [])))
