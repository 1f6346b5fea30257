"""The records of a check before a start; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

FINE, WARNING, REFUSED = "fine", "warning", "refused"


@dataclass(frozen=True)
class ServeFinding:
    """One answer: what was asked, how it is, and what to do about it.

    `level` is ``fine``, ``warning``, or ``refused`` if the server would not start, or not serve rightly.
    """

    about: str
    level: str
    says: str
    do: str = ""


@dataclass(frozen=True)
class ServedLayers:
    """Layers of one kind: numbers, weight format, and moectl's backend; empty if the engine computes them."""

    layers: tuple[int, ...]
    scheme: str
    backend: str


@dataclass(frozen=True)
class ServeReport:
    """Every finding of a check, and the command that starts the server.

    Attributes:
        release: of the engine; None if it is not installed and none was stated.
        gpu: the device's name.
        layers: who computes what.
        serve: the command; works as it is if `works`.
    """

    checkpoint: str
    engine: str
    release: str | None
    gpu: str
    tp: int
    ep: int
    converted: bool | None
    findings: tuple[ServeFinding, ...]
    layers: tuple[ServedLayers, ...]
    serve: str

    @property
    def works(self) -> bool:
        """Whether nothing was refused."""
        return all(finding.level != REFUSED for finding in self.findings)
