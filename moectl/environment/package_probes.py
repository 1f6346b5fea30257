"""How to recognize the optional packages that backends need, and what they must contain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """Where a package may be installed, and what its files must contain.

    Attributes:
        modules: importable names, an engine's bundled copy last.
        distribution: its name in package metadata.
        marks: files of which the real package has at least one; empty: accept any package of the name.
        symbols: dotted names that it must define.
        own: additional symbols and library file patterns (``*.so``) that moectl's runners need, but
            engines do not.
        get: how to install it.
        other: publisher of an unrelated package with the same name, if there is one.
    """

    modules: tuple[str, ...]
    distribution: str = ""
    marks: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    get: str = ""
    other: str = ""


TOOLS = ("nvcc", "ninja")
"""Programs that compile kernels at first use."""
