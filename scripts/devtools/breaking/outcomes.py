"""What a reader may do with any input: end in time and memory, raise moectl's errors, print plain text."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import resource
import signal
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 10
"""Of processor time, within which a case ends."""

WAITING = 60
"""Seconds on the clock within which a case ends, though other programs may have the processors."""

MEGABYTES = 1000
"""How much a case may add to the memory of the process."""


@dataclass(frozen=True)
class Defect:
    """What is wrong with an answer: its kind, the same for all inputs with the same cause, and words."""

    kind: str
    words: str


class TooLongError(BaseException):
    """A case has not ended in time."""


class WrongAnswerError(Exception):
    """A reader's answer that must not be, such as what another library refuses."""


@contextlib.contextmanager
def in_time(seconds: float = SECONDS) -> Iterator[None]:
    """Raises TooLongError inside the context when the time is over."""

    def stop(number: int, frame: object) -> None:
        raise TooLongError

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, WAITING))
    before = [signal.signal(number, stop) for _, number, _ in timers]
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def raw_characters(text: str) -> str:
    """What in `text` would steer a terminal."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return ""
    steering = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(sorted({c for c in text if c not in "\n\t" and unicodedata.category(c) in steering}))


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, what it printed to stdout, and what to stderr."""

    code: int
    out: str
    error: str


def ended(*words: object) -> Ended:
    """Runs a command of moectl's; WrongAnswerError for an exit code or an error that is not moectl's."""
    from moectl.errors import ExitCode

    given = [str(word) for word in words]
    out, error = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            _commands()(given, prog_name="moectl")
        except SystemExit as exiting:
            code = exiting.code
    text, said = out.getvalue(), error.getvalue()
    if code is None:
        code = int(ExitCode.DONE)
    if code not in {int(each) for each in ExitCode} or "internal error" in said or "Traceback" in said:
        raise WrongAnswerError(f"exit code {code}: {said[-400:]}")
    assert isinstance(code, int)
    if "--json" in given and text and code != int(ExitCode.USAGE):
        json.loads(text, parse_constant=_no_constant)
    if asks_for_color(given):
        text, said = without_colors(text), without_colors(said)
    return Ended(code, text, said)


@functools.cache
def _commands() -> Any:
    """moectl's commands, which take longer to make than many cases."""
    import typer

    from moectl.cli.main import app

    return typer.main.get_command(app)


def command(*words: object) -> str:
    """What a command of moectl's prints, without the colours that it was asked for."""
    found = ended(*words)
    return found.out + found.error


def asks_for_color(words: Sequence[str]) -> bool:
    """Whether a command line, or a variable in its place, has ``--color always``."""
    before = ("", *words)
    given = any(
        word == "--color=always" or (word == "always" and option == "--color")
        for option, word in zip(before, words, strict=False)
    )
    name = f"MOECTL_{words[0].upper().replace('-', '_')}_COLOR" if words else "MOECTL_COLOR"
    return given or "always" in (os.environ.get("MOECTL_COLOR"), os.environ.get(name))


def without_colors(text: str) -> str:
    """`text` without the sequences of moectl's own colours; others stay."""
    return _own_colors().sub("", text)


@functools.cache
def _own_colors() -> re.Pattern[str]:
    """What sets and ends each colour that moectl has for results and for messages."""
    from rich.color import ColorSystem
    from rich.style import Style

    from moectl.cli.output import RED, YELLOW
    from moectl.cli.text_blocks import TONES

    tones = [Style.parse(tone).render("x", color_system=ColorSystem.STANDARD) for tone in TONES.values()]
    begins = {f"\x1b[{code}m" for code in (RED, YELLOW)} | {tone.partition("x")[0] for tone in tones} - {""}
    return re.compile("|".join(map(re.escape, sorted(begins | {"\x1b[0m"}))))


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} in JSON")


def function(call: Callable[[], object]) -> str:
    """The words of the MoectlError that `call` raises, if it raises one."""
    from moectl.errors import MoectlError

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            call()
        except MoectlError as error:
            return str(error)
    return ""


def defect_of(read: Callable[[], str]) -> Defect | None:
    """What is wrong with a reader's answer."""
    before = _peak_megabytes()
    try:
        with in_time():
            text = read()
    except TooLongError:
        return Defect("time", f"did not end within {SECONDS} s of processor time, or {WAITING} s")
    except BaseException as error:
        return _raised(error)
    if found := raw_characters(text):
        return Defect("raw characters", f"printed {found!a}")
    if (grown := _peak_megabytes() - before) > MEGABYTES:
        return Defect("memory", f"took {grown:.0f} MB")
    return None


def _raised(error: BaseException) -> Defect:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/moectl/" in frame.filename] or frames
    where = ", ".join(
        dict.fromkeys(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own[-1], frames[-1]))
    )
    text = " ".join(str(error).split())
    kind = text.split(":")[0][:60] if isinstance(error, WrongAnswerError) else where
    return Defect(f"{type(error).__name__} {kind}", f"{type(error).__name__}: {text[:400]} ({where})")


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
