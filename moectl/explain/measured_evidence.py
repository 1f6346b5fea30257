"""Measurements of a layer on a device, for an explanation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..cache import backend_times_file, launches_file
from ..cache.backend_times import MeasuredTimes
from ..environment import Device, Packages
from ..errors import UsageError
from ..files.records import to_json
from ..problem.moe_problem import MoEProblem
from ..problem.rank_sizes import as_sliced


@dataclass(frozen=True)
class MeasuredEvidence:
    """Measurements of one layer on one device.

    Attributes:
        measured: times of backends, as `moectl bench --save` keeps them.
        tuned: kernel configs that `moectl tune` found for moectl's own kernels.
        notes: cache files that are ignored, and why.
    """

    measured: MeasuredTimes = field(default_factory=MeasuredTimes)
    tuned: tuple[launches_file.LaunchRow, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rows": self.measured.to_json(),
            "tuned": to_json(self.tuned),
            "notes": list(self.notes),
        }


EvidenceLookup = Callable[[Device, MoEProblem, Packages], MeasuredEvidence]


def nothing(device: Device, problem: MoEProblem, packages: Packages) -> MeasuredEvidence:
    """No measurements: the policy's priority order decides."""
    return MeasuredEvidence()


def cached(device: Device, problem: MoEProblem, packages: Packages) -> MeasuredEvidence:
    """What the user's cache has for a rank's share of a layer, with the versions of `packages` if known.

    Shares are measured as conversions slice them; of those that cannot be sliced nothing is known.
    """
    try:
        problem = as_sliced(problem)
    except UsageError:
        return MeasuredEvidence()
    times = backend_times_file.known(device, problem, packages.versions)
    rows, note = launches_file.rows_of(problem, device)
    return MeasuredEvidence(times.measured, rows, (*times.notes, *([note] if note else [])))
