"""Exceptions for the user: what is wrong, why, what to do next, and the exit code."""

from __future__ import annotations

import re
from enum import IntEnum

from .printable import printable


class ExitCode(IntEnum):
    """Exit status of every moectl command."""

    DONE = 0
    FOUND = 1
    USAGE = 2
    UNAVAILABLE = 3
    BAD_CHECKPOINT = 4
    INTERRUPTED = 130


COMMANDS = ("moectl", "pip", "hf")
"""Programs: a hint that starts with one of these names is a command line."""

_WORD = re.compile(r"[a-z]+(?=[\s,:;]|$)")
"""A first word that is not the name of a file, an option or a variable."""


def sentence(text: str) -> str:
    """`text` with a capital letter and a period; empty texts and command lines are unchanged.

    Example:
        >>> sentence("remove the file"), sentence("pip install torch")
        ('Remove the file.', 'pip install torch')
    """
    if not text or text.split(maxsplit=1)[0] in COMMANDS:
        return text
    capitalized = text[0].upper() + text[1:] if _WORD.match(text) else text
    return capitalized if capitalized.endswith((".", "?", "!")) else f"{capitalized}."


def install_hint(extra: str) -> str:
    """The command lines that install an extra of moectl: from the index, and in a clone."""
    return f"pip install 'moectl[{extra}]'   (in a clone of moectl: pip install '.[{extra}]')"


class MoectlError(Exception):
    """An error that is explained to the user instead of printed as a traceback.

    The attribute `what` never ends with a period, because it is embedded in other sentences; `reason` and
    `hint` are full sentences or command lines. `str` joins all three. They are `printable`, whatever names
    from files they were made of: whoever catches the error may log it.

    Args:
        what: what is wrong: what was expected, and what was found.
        reason: why it matters or where it comes from, unless obvious from `what`.
        hint: what to do next, as a command if possible.
    """

    exit_code: ExitCode = ExitCode.FOUND

    def __init__(self, what: str, *, reason: str = "", hint: str = "") -> None:
        what = printable(what)
        super().__init__(what)
        self.what = what if what.endswith("...") else what.removesuffix(".")
        self.reason = sentence(printable(reason))
        self.hint = sentence(printable(hint))

    def __str__(self) -> str:
        more = [part for part in (self.reason, self.hint) if part]
        stop = "." if more and not self.what.endswith((".", "?", "!")) else ""
        return " ".join([f"{self.what}{stop}", *more])

    def to_json(self) -> dict[str, str | int]:
        """Plain data: the three texts, empty ones too, and the exit code."""
        texts = {"what": self.what, "reason": self.reason, "hint": self.hint}
        return {**texts, "exit_code": int(self.exit_code)}


class UsageError(MoectlError):
    """The arguments are invalid or contradict each other."""

    exit_code = ExitCode.USAGE


class NoBackend(MoectlError):
    """No backend supports the problem, or the requested one does not."""

    exit_code = ExitCode.FOUND


class BackendFailed(MoectlError):
    """A backend failed while it prepared or ran a layer; moectl never falls back to another one silently.

    Args:
        backend: its name.
        why: the message of its library or kernel, shortened.
        layer: the layer's number, if known where the error is raised; otherwise a caller adds it with `on`.
    """

    exit_code = ExitCode.FOUND

    def __init__(self, backend: str, why: str, *, layer: int | None = None, hint: str = "") -> None:
        where = "" if layer is None else f" on layer {layer}"
        super().__init__(f"the {backend} backend failed{where}: {why}", hint=hint)
        self.backend = backend
        self.why = why
        self.layer = layer

    def on(self, layer: int) -> BackendFailed:
        """This error with the layer's number, if it has none yet."""
        if self.layer is not None:
            return self
        return BackendFailed(self.backend, self.why, layer=layer, hint=self.hint)


class CheckFailed(MoectlError):
    """A result is wrong."""

    exit_code = ExitCode.FOUND


class Unavailable(MoectlError):
    """Not possible on this machine: a device, package, network or disk space is missing."""

    exit_code = ExitCode.UNAVAILABLE


class CheckpointError(MoectlError):
    """A checkpoint or converted folder is damaged, incomplete or not understood."""

    exit_code = ExitCode.BAD_CHECKPOINT
