"""The answer of an engine itself: its own selection code, asked about the same problem in another process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..environment.installed_packages import package_folder
from ..environment.python_environments import PythonEnvironment
from ..errors import CheckpointError, Unavailable, UsageError
from ..files.safe_reading import last_text, read_bounded
from ..files.strict_json import json_words, parse_value
from ..oracle.decision import DEPLOYMENT, Decision
from ..oracle.engine import Engine
from ..oracle.recorded_fields import FIELDS, DecisionPair
from ..oracle.registry import newest_engines
from .explanation import Explanation

TIMEOUT_S = 300.0
"""Seconds that the engine has; importing one takes up to a minute from a slow disk."""
LONGEST_ANSWER = 64 << 20
"""Most bytes of an answer."""

NEEDED = ("selected", "experts_cls", "monolithic", "padded", "error", "gates", "rejected", "priority")
BEFORE_EXPERTS = ("usable", "gates", "error")
"""Fields that say nothing where moectl refuses the deployment before any backend is asked."""


@dataclass(frozen=True)
class FieldDifference:
    """A field of a decision in which the `engine` and `moectl` differ."""

    field: str
    engine: object
    moectl: object


@dataclass(frozen=True)
class AskedGroup:
    """The engine's own answer for a group of layers, as recorded decisions have it, beside moectl's."""

    layers: tuple[int, ...]
    row: Mapping[str, Any]
    decision: Decision
    differences: tuple[FieldDifference, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        row = self.row
        return {
            "layers": list(self.layers),
            "selected": row["selected"],
            "experts": row["experts_cls"],
            "error": row["error"] or row.get("create_weights_error") or "; ".join(row["gates"]) or None,
            "priority": row["priority"],
            "rejected": [
                {"backend": each["backend"], "experts": each["experts_cls"], "reason": each["reason"]}
                for each in row["rejected"]
            ],
            "differences": [
                {"field": each.field, "engine": str(each.engine), "moectl": str(each.moectl)}
                for each in self.differences
            ],
        }


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine's own code chose.

    Attributes:
        title: the engine with the release that answered; `python`: the interpreter that ran it.
        own_device: the engine found the device in this machine; otherwise it was told its properties.
        bare: only its Python files are there, so it was told the packages, too.
    """

    title: str
    python: str
    own_device: bool
    bare: bool
    groups: tuple[AskedGroup, ...]

    @property
    def same(self) -> bool:
        """True when no field of any decision differs."""
        return not any(group.differences for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "engine": self.title,
            "python": self.python,
            "own_device": self.own_device,
            "bare": self.bare,
            "same": self.same,
            "groups": [group.to_json() for group in self.groups],
            "failure": None,
        }


def can_be_asked(engine: Engine) -> None:
    """Raises UsageError if moectl does not know how to ask the engine's own code."""
    if engine.own_code is None:
        asked = dict.fromkeys(each.title for each in newest_engines() if each.own_code)
        raise UsageError(
            f"--ask-engine cannot ask {engine.title}, only {' and '.join(asked) or 'no engine'}",
            hint="leave --ask-engine out for the answer by moectl's rules",
        )


def complete(engine: Engine, where: PythonEnvironment | None) -> bool | None:
    """Whether the engine's installation has its compiled files; None if it is not installed.

    Without them it is told which packages there are; with them it finds out itself.
    """
    can_be_asked(engine)
    folder = package_folder(engine.package, where)
    if folder is None:
        return None
    return engine.own_code is not None and any(folder.glob(engine.own_code.compiled))


def ask_engine(
    explanation: Explanation,
    checkpoint: Checkpoint,
    engine: Engine,
    where: PythonEnvironment | None = None,
    timeout_s: float = TIMEOUT_S,
) -> EngineAnswer:
    """What the engine in `where` (None: in this Python) answers where `explanation` of `checkpoint` does.

    Raises UsageError for a question that cannot be put to it, Unavailable, in one sentence, if it is not
    installed or does not answer.
    """
    installed, python = complete(engine, where), where.interpreter if where else sys.executable
    if engine.own_code is None or installed is None:
        raise Unavailable(
            f"{engine.title} is not installed in {where.name if where else sys.prefix}",
            hint="name an environment that has it: --ask-engine --python PATH/bin/python",
        )
    groups = [(checkpoint.group_of(each.layers[0]), each.decision.inputs) for each in explanation.groups]
    question = engine.own_code.question(checkpoint, groups)
    packages = explanation.packages
    question |= {
        "bare": not installed,
        "packages": [name for name in packages.versions if packages.has(name)],
        "env": {name: value for name, value in packages.env.items() if engine.reads(name)},
    }
    reply = _reply(engine.title, python, engine.own_code.script, question, timeout_s)
    return _compared(engine, python, reply, explanation, bare=not installed)


def _reply(
    title: str, python: str, script: Path, question: Mapping[str, Any], timeout_s: float
) -> Mapping[str, Any]:
    """What the script wrote. Raises Unavailable if it wrote nothing of use."""
    with tempfile.TemporaryDirectory(prefix="moectl-ask-") as folder:
        out, said = Path(folder) / "answer.json", Path(folder) / "stderr"
        text = json.dumps({**question, "out": str(out)}, default=list)
        code = _run([python, str(script)], text, said, timeout_s)
        if code is None:
            raise Unavailable(
                f"{title} did not answer within {timeout_s:g} s and was stopped",
                hint=f"try `{python} -c 'import {title.lower()}'`, which should take seconds",
            )
        if not out.exists():
            ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise Unavailable(f"{title} gave no answer: {python} {ended}{_last_line(said)}")
        try:
            reply = parse_value(read_bounded(out, LONGEST_ANSWER, "it"), "it", ValueError)
        except CheckpointError as error:
            raise Unavailable(f"{title} gave an answer that cannot be used: {error.what}") from error
        except ValueError as error:
            raise Unavailable(f"{title} gave an answer that is no JSON: {error}") from error
    if not isinstance(reply, dict):
        raise Unavailable(f"{title} gave an answer that is not an object, but {json_words(reply)}")
    if reply.get("absent"):
        raise Unavailable(f"{title} cannot be imported by {python}, which does not find its package")
    if "failed" in reply:
        raise Unavailable(
            f"{title} could not be asked: {_line(reply['failed'])}",
            reason="Its installation is incomplete, or its internal functions have moved",
            hint="leave --ask-engine out for the answer by moectl's rules",
        )
    return reply


def _run(command: list[str], text: str, said: Path, timeout_s: float) -> int | None:
    """The exit code of `command` with `text` as its input, whatever it prints; None if it was stopped."""
    with said.open("wb") as stderr:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd=said.parent,
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{command[0]} cannot be run: {error.strerror}") from error
        try:
            process.communicate(text.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # It may have started processes of its own, which hold nothing that is needed.
            _end(process)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(said: Path) -> str:
    lines = [line for line in last_text(said).splitlines() if line.strip()]
    return f": {_line(lines[-1])}" if lines else ""


def _line(text: object, most: int = 300) -> str:
    """The text on one line, shortened."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[:most]}..."


def _compared(
    engine: Engine, python: str, reply: Mapping[str, Any], explanation: Explanation, bare: bool
) -> EngineAnswer:
    rows = reply.get("rows")
    if not isinstance(rows, list) or len(rows) != len(explanation.groups):
        raise Unavailable(f"{engine.title} gave an answer without a row for each group of layers")
    groups = []
    for group, row in zip(explanation.groups, rows, strict=True):
        if not isinstance(row, dict):
            raise Unavailable(f"{engine.title} gave an answer without a decision")
        if missing := [name for name in NEEDED if name not in row]:
            raise Unavailable(f"{engine.title} gave an answer without {', '.join(missing)}")
        if row.get("not_run"):
            raise Unavailable(
                f"{engine.title} {reply.get('version')} could not be asked: {_line(row['not_run'])}",
                reason="Its internal functions have moved",
                hint="leave --ask-engine out for the answer by moectl's rules",
            )
        try:
            asked = AskedGroup(group.layers, row, group.decision, differences(row, group.decision))
            asked.to_json()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {_line(error)}"
            raise Unavailable(f"{engine.title} gave an answer of another form ({problem})") from error
        groups.append(asked)
    title = f"{engine.title} {reply.get('version')}"
    return EngineAnswer(title, python, bool(reply.get("own_device")), bare, tuple(groups))


def differences(row: Mapping[str, Any], decision: Decision) -> tuple[FieldDifference, ...]:
    """Where the engine's decision is not ours."""
    pair, found = DecisionPair(row, decision), []
    early = any(gate.kind == DEPLOYMENT for gate in decision.gates)
    for compared in FIELDS:
        if not compared.stated(pair) or (early and compared.name in BEFORE_EXPERTS):
            continue
        theirs, ours = compared.recorded(pair), compared.ours(pair)
        if theirs != ours:
            found.append(FieldDifference(compared.name, theirs, ours))
    return tuple(found)
