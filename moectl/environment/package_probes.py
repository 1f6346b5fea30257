"""How to recognize the optional packages that backends need, and what they must contain."""

from __future__ import annotations

import re
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
        oldest: the first version with all symbols; empty if unknown.
        get: how to install it.
        other: publisher of an unrelated package with the same name, if there is one.
    """

    modules: tuple[str, ...]
    distribution: str = ""
    marks: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    oldest: str = ""
    get: str = ""
    other: str = ""

    def too_old(self, version: str) -> bool:
        """True when `version` is older than `oldest`; an unknown version is not.

        Only release numbers are compared.

        Example:
            >>> probe = Probe(("flashinfer",), oldest="0.7.2")
            >>> probe.too_old("0.10"), probe.too_old("0.7"), probe.too_old("")
            (False, True, False)
        """
        return () < release_numbers(version) < release_numbers(self.oldest)


def release_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version before any suffix: (0, 7, 2) for ``0.7.2.post1+cu130``; empty without any."""
    found = re.match(r"\d+(?:\.\d+)*", version.strip().removeprefix("v"))
    return tuple(map(int, found[0].split("."))) if found else ()


TOOLS = ("nvcc", "ninja")
"""Programs that compile kernels at first use."""
