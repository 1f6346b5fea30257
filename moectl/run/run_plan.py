"""How layers are run, as plain values. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EVERY = ("all",)
"""In place of names: all backends that can serve a layer."""


@dataclass(frozen=True)
class RunPlan:
    """How layers are run.

    Attributes:
        backends: names, or `EVERY`; none for the best one of each layer.
        fallback: where the one that is chosen fails, the next that can serve takes over.
        dtype: of the activations; empty for the model's.
        device: ``cpu`` or ``cuda``; empty for a GPU where there is one.
        tokens, seed, source: as in `workload_of`.
        stress: run the stress cases too.
        repeats: timed calls of each backend.
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
        """Whether all backends that can serve a layer are compared."""
        return self.backends == EVERY

    @property
    def compares(self) -> bool:
        """Whether several backends are run, as far as there are several."""
        return self.every or len(self.backends) > 1
