"""The floor of a layer at several routings, which `bench_peers` holds its times against."""

from __future__ import annotations

from moectl.floors import Floor, Rates, floor_of
from moectl.kernels.roofline import work_of
from moectl.problem import MoEProblem
from moectl.random_layer import Routed


def mean_floor(problem: MoEProblem, sets: list[Routed], rates: Rates) -> Floor:
    """The mean over `sets` of the least time of a call."""
    floors = [floor_of(work_of(problem, routed.ids), rates) for routed in sets]
    return Floor(sum(f.seconds for f in floors) / len(floors), floors[0].bound)
