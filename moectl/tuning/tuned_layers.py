"""The layers that are asked for by a checkpoint or by name, as one rank sees them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cache.measurement_keys import layer_key
from ..checkpoint import Checkpoint
from ..problem.layer_ranges import ranges
from ..problem.moe_problem import MoEProblem, Parallel
from ..problem.published_layers import model_problem


@dataclass(frozen=True, slots=True)
class TunedLayer:
    """A layer and what it is called."""

    name: str
    problem: MoEProblem


def checkpoint_layers(checkpoint: Checkpoint, parallel: Parallel) -> list[TunedLayer]:
    """One layer of each group of `checkpoint`, its share of one rank; equal ones once.

    Raises UsageError when the experts cannot be sliced or spread so.
    """
    name = checkpoint.origin.name.rstrip("/").rpartition("/")[2]
    several = len(checkpoint.groups) > 1
    return _once(
        TunedLayer(f"{name} ({ranges(group.layers)})" if several else name, group.problem.on(parallel))
        for group in checkpoint.groups
    )


def named_layers(names: Sequence[str], parallel: Parallel) -> list[TunedLayer]:
    """The layers of `moectl.problem.published_layers` of these names; UsageError for a name that is none."""
    return _once(TunedLayer(name, model_problem(name).on(parallel)) for name in names)


def _once(layers: Iterable[TunedLayer]) -> list[TunedLayer]:
    found: dict[str, TunedLayer] = {}
    for layer in layers:
        found.setdefault(str(layer_key(layer.problem)), layer)
    return list(found.values())
