"""What an engine makes of its command line before it creates a layer: the first of two stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """Resolved server arguments.

    Attributes:
        request: the backend that layers are then asked for by name; empty: they choose.
        exchange: the all2all kernels.
        notes: what differs from the command line, each with the reason.
        refusals: why the engine would not start.
        why: where `request` comes from, if it is not the command line's.
    """

    request: str = ""
    exchange: str = "none"
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    why: str = ""
