"""Options of a run as plain values. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POLICY = "moectl"
"""The policy whose backends moectl runs itself."""

EVERY = ("all",)
"""In place of names: all backends that support a layer."""


@dataclass(frozen=True)
class RunPlan:
    """How layers are run.

    Attributes:
        backends: names, or `EVERY`; empty for the best one of each layer.
        fallback: whether the next backend that supports the layer takes over if the chosen one fails.
        dtype: dtype of the activations; empty for the model's.
        device: ``cpu`` or ``cuda``; empty for a GPU if there is one.
        tokens, seed, source: as in `workload_of`.
        stress: whether to run the stress cases as well.
        repeats: timed calls of each backend.

    Example:
        >>> RunPlan(backends=("moectl", "torch"), tokens=64).compares
        True
    """

    backends: tuple[str, ...] = ()
    fallback: bool = False
    dtype: str = ""
    device: str = ""
    tokens: int = 8
    seed: int = 0
    source: Path | None = None
    stress: bool = False
    repeats: int = 5

    @property
    def every(self) -> bool:
        """Whether all backends that support a layer are compared."""
        return self.backends == EVERY

    @property
    def compares(self) -> bool:
        """Whether several backends are run and compared."""
        return self.every or len(self.backends) > 1
