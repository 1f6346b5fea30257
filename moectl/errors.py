"""Errors a user sees: one sentence, the reason, the next command, an exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of every moectl command."""

    DONE = 0
    FOUND = 1
    USAGE = 2
    UNAVAILABLE = 3
    BAD_CHECKPOINT = 4
    INTERRUPTED = 130


class MoectlError(Exception):
    """An error that is explained to the user instead of traced.

    Args:
        what: one sentence: what is wrong, expected and got.
        reason: why it matters or where it comes from, if `what` does not say it.
        hint: what to do next, a command where there is one.
    """

    exit_code: ExitCode = ExitCode.FOUND

    def __init__(self, what: str, *, reason: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.reason = reason
        self.hint = hint

    def __str__(self) -> str:
        *first, last = [part for part in (self.what, self.reason, self.hint) if part] or [""]
        return " ".join([*(part if part.endswith((".", "?", "!")) else f"{part}." for part in first), last])


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
