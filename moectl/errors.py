"""Errors a user sees: one sentence, the reason, the next command, an exit code."""

from __future__ import annotations

import re
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of every moectl command."""

    DONE = 0
    FOUND = 1
    USAGE = 2
    UNAVAILABLE = 3
    BAD_CHECKPOINT = 4
    INTERRUPTED = 130


COMMANDS = ("moectl", "pip")
"""Programs: a hint that begins with the name of one is a command line."""

_WORD = re.compile(r"[a-z]+(?=[\s,:;]|$)")
"""A word at the beginning, which is no name of a file, an option or a variable."""


def sentence(text: str) -> str:
    """`text` with a capital and a full stop; nothing and command lines as they are."""
    if not text or text.split(maxsplit=1)[0] in COMMANDS:
        return text
    begun = text[0].upper() + text[1:] if _WORD.match(text) else text
    return begun if begun.endswith((".", "?", "!")) else f"{begun}."


class MoectlError(Exception):
    """An error that is explained to the user instead of traced.

    Whatever the texts end with, `what` has no full stop, as it stands in other sentences, and `reason` and
    `hint` are sentences; a command line stays as it is. As a string it is all of them, one after the other.

    Args:
        what: what is wrong, expected and got.
        reason: why it matters or where it comes from, if `what` does not say it.
        hint: what to do next, a command where there is one.
    """

    exit_code: ExitCode = ExitCode.FOUND

    def __init__(self, what: str, *, reason: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what if what.endswith("...") else what.removesuffix(".")
        self.reason = sentence(reason)
        self.hint = sentence(hint)

    def __str__(self) -> str:
        more = [part for part in (self.reason, self.hint) if part]
        stop = "." if more and not self.what.endswith((".", "?", "!")) else ""
        return " ".join([f"{self.what}{stop}", *more])


class UsageError(MoectlError):
    """The arguments do not make sense together."""

    exit_code = ExitCode.USAGE


class NoBackend(MoectlError):
    """No backend, or not the one asked for, can serve the problem."""

    exit_code = ExitCode.FOUND


class BackendFailed(MoectlError):
    """A backend broke while it prepared or ran a layer: an error, never a reason to take another in silence.

    Args:
        backend: its name.
        why: what its library or kernel said, in a few words.
        layer: the layer's number, where the one who raises knows it; whoever does adds it with `on`.
    """

    exit_code = ExitCode.FOUND

    def __init__(self, backend: str, why: str, *, layer: int | None = None, hint: str = "") -> None:
        where = "" if layer is None else f" on layer {layer}"
        super().__init__(f"the {backend} backend failed{where}: {why}", hint=hint)
        self.backend = backend
        self.why = why
        self.layer = layer

    def on(self, layer: int) -> BackendFailed:
        """The same failure with the layer's number, where it has none yet."""
        if self.layer is not None:
            return self
        return BackendFailed(self.backend, self.why, layer=layer, hint=self.hint)


class CheckFailed(MoectlError):
    """A result is not what it must be."""

    exit_code = ExitCode.FOUND


class Unavailable(MoectlError):
    """Not possible on this machine: no such device, package, network or disk space."""

    exit_code = ExitCode.UNAVAILABLE


class CheckpointError(MoectlError):
    """A checkpoint or converted folder is damaged, incomplete or not understood."""

    exit_code = ExitCode.BAD_CHECKPOINT
