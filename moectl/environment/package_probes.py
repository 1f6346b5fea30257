"""Optional packages that decide on backends: how to tell each from others, and what it must hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """Where a package may be installed, and what must be in its source files.

    Attributes:
        modules: importable names, the engine's bundled copy last.
        distribution: name of its metadata.
        marks: files of which the real package has at least one; empty: any package of the name.
        symbols: dotted names that are looked for.
        own: what this tool's own runners look for and engines do without: symbols, and patterns of
            library files (``*.so``).
        serves: what it is for, in a few words.
        get: how to install it.
        other: who publishes another package of the same name, where there is one.
    """

    modules: tuple[str, ...]
    distribution: str = ""
    marks: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    serves: str = ""
    get: str = ""
    other: str = ""


TOOLS = ("nvcc", "ninja")
"""Programs that compile kernels when they are first called."""
