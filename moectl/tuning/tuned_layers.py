"""The layers to tune, of a checkpoint or by name, as one rank has them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cache.measurement_keys import LayerKey, layer_key
from ..checkpoint import Checkpoint
from ..checkpoint.source.named_layers import named_layer
from ..problem.layer_ranges import ranges
from ..problem.moe_problem import MoEProblem, Parallel


@dataclass(frozen=True, slots=True)
class TunedLayer:
    """A layer and its name."""

    name: str
    problem: MoEProblem


def checkpoint_layers(checkpoint: Checkpoint, parallel: Parallel) -> list[TunedLayer]:
    """One rank's share of one layer of each group of `checkpoint`, without duplicates.

    Raises UsageError when the experts cannot be sharded like that.
    """
    name = checkpoint.origin.name.rstrip("/").rpartition("/")[2]
    several = len(checkpoint.groups) > 1
    return _once(
        TunedLayer(f"{name} ({ranges(group.layers)})" if several else name, group.problem.on(parallel))
        for group in checkpoint.groups
    )


def named_layers(names: Sequence[str], parallel: Parallel) -> list[TunedLayer]:
    """The layers of built-in models with these names, ``NAME`` or ``NAME:FORMAT``; UsageError if unknown.

    Example:
        >>> [layer.name for layer in named_layers(["kimi-k2"], Parallel(2))]
        ['kimi-k2']
    """
    layers = map(named_layer, names)
    return _once(TunedLayer(name, problem.on(parallel)) for name, problem in layers)


def _once(layers: Iterable[TunedLayer]) -> list[TunedLayer]:
    by_key: dict[LayerKey, TunedLayer] = {}
    for layer in layers:
        by_key.setdefault(layer_key(layer.problem), layer)
    return list(by_key.values())
