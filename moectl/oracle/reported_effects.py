"""What changes of backends did to users of an engine, as public threads measured it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..environment import Device
from ..environment.package_probes import release_numbers
from ..problem.moe_problem import MoEProblem
from .gpu_archs import Archs


@dataclass(frozen=True, slots=True)
class ReportedEffect:
    """A measured effect of a change from one backend to another.

    Attributes:
        release: the first release with the change.
        before, after: the backends, by the user's names.
        where: the devices; `weight`: the weight format's name; `when` narrows to some layers.
        says: a sentence with what was measured on what, beginning with the thread.
    """

    release: str
    before: str
    after: str
    where: Archs
    weight: str
    says: str
    when: Callable[[MoEProblem], bool] = lambda problem: True

    def applies(self, older: str, newer: str) -> bool:
        """True if the change happened after the engine called `older`, up to the one called `newer`."""
        first, last = (release_numbers(name.rpartition("-")[2]) for name in (older, newer))
        return first < release_numbers(self.release) <= last

    def fits(self, problem: MoEProblem, device: Device, before: str, after: str) -> bool:
        """True for such a layer on such a device, with that change of backends."""
        return (
            (before, after) == (self.before, self.after)
            and problem.scheme.weight.name == self.weight
            and any(arch.fits(device) for arch in self.where)
            and self.when(problem)
        )
