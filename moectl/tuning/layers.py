"""The layers that are asked for by a checkpoint or by name, as one rank sees them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cache.keys import layer_key
from ..checkpoint import Checkpoint
from ..models import model_problem
from ..problem import MoEProblem, Parallel
from ..ranges import ranges


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and what it is called."""

    name: str
    problem: MoEProblem


def checkpoint_layers(checkpoint: Checkpoint, parallel: Parallel) -> list[Layer]:
    """One layer of each group of `checkpoint`, its share of one rank; equal ones once.

    Raises UsageError when the experts cannot be sliced or spread so.
    """
    name = checkpoint.origin.name.rstrip("/").rpartition("/")[2]
    several = len(checkpoint.groups) > 1
    return _once(
        Layer(f"{name} ({ranges(group.layers)})" if several else name, group.problem.on(parallel))
        for group in checkpoint.groups
    )


def named_layers(names: Sequence[str], parallel: Parallel) -> list[Layer]:
    """The layers of `moectl.models` of these names; UsageError for a name that is none."""
    return _once(Layer(name, model_problem(name).on(parallel)) for name in names)


def _once(layers: Iterable[Layer]) -> list[Layer]:
    found: dict[str, Layer] = {}
    for layer in layers:
        found.setdefault(str(layer_key(layer.problem)), layer)
    return list(found.values())
