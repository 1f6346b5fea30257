"""The machine that layers run on, and which backends can serve a layer there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..cache import measurements
from ..cache.folder import CacheWarning
from ..environment import Device, Packages, detect_cpu, detect_device
from ..errors import MoectlError, NoBackend, Unavailable, UsageError
from ..oracle.decision import Decision
from ..oracle.machine_packages import packages_from
from ..oracle.registry import policy_named
from ..oracle.select import select
from ..oracle.sentences import sentence
from ..problem import MoEProblem

POLICY = "moectl"
"""The policy whose backends this tool runs itself."""


@dataclass(frozen=True)
class Machine:
    """Where a layer runs: torch's device, and the same machine as the oracle sees it."""

    torch: torch.device
    device: Device
    packages: Packages


def this_machine(device: str | None = None) -> Machine:
    """This machine, on `device` (``cpu`` or ``cuda``); a GPU where torch has one by default.

    Raises Unavailable when torch sees no such device.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    packages = packages_from(None)
    if name == "cpu":
        return Machine(torch.device("cpu"), detect_cpu(), packages)
    if not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device here", hint="run on the CPU with --device cpu")
    return Machine(torch.device("cuda"), detect_device(), packages)


def choose_backends(
    problem: MoEProblem, machine: Machine, names: Sequence[str] = (), stored: str = ""
) -> list[str]:
    """Runners that can serve `problem` on `machine`, best first; only `names` where some are given.

    One that reads the layout `stored` comes before the others: it needs nothing laid out anew. Then comes
    the fastest of those that `moectl bench --save` has measured here on such a layer (`measured_choice`).

    Raises:
        Unavailable: a backend asked for needs another device.
        NoBackend: a backend asked for, or every one, refuses the problem; the reasons are in the text.
    """
    if names:
        return list(dict.fromkeys(_asked(problem, machine, name) for name in names))
    decision = _decide(problem, machine, None)
    if not decision.best_first:
        raise NoBackend(decision.error)
    ranked = sorted(decision.best_first, key=lambda c: not stored or c.layout != stored)
    return list(dict.fromkeys(c.backend.runner for c in ranked))


def none_serves(refused: Sequence[MoectlError]) -> MoectlError:
    """The error of backends that were asked for and of which none can serve: the one, or one of them all."""
    if len(refused) == 1:
        return refused[0]
    elsewhere = next((error for error in refused if isinstance(error, Unavailable)), None)
    listed = "; ".join(error.what for error in refused)
    text = f"none of the backends that were asked for can serve: {listed}"
    return Unavailable(text, hint=elsewhere.hint) if elsewhere else NoBackend(text, hint=refused[0].hint)


def measured_choice(problem: MoEProblem, machine: Machine, stored: str = "") -> str:
    """Why times that were measured here choose the first backend, in a sentence; empty where none do."""
    decision = _decide(problem, machine, None)
    first = choose_backends(problem, machine, (), stored)[:1]
    if decision.ranking is None or decision.chosen is None or first != [decision.chosen.backend.runner]:
        return ""
    return f"{decision.ranking.best}: {decision.ranking}"


def left_out(problem: MoEProblem, machine: Machine) -> Mapping[str, str]:
    """Backends that cannot serve `problem` on `machine`, each with its first reason."""
    decision = _decide(problem, machine, None)
    usable = {c.backend.name for c in decision.candidates if c.usable}
    reasons: dict[str, str] = {}
    for c in decision.candidates:
        if c.failed and c.backend.name not in usable:
            reasons.setdefault(c.backend.name, sentence(c.failed[0]))
    return reasons


def _decide(problem: MoEProblem, machine: Machine, name: str | None) -> Decision:
    known = measurements.known(machine.device, problem, machine.packages.versions)
    for note in known.notes:
        warnings.warn(note, CacheWarning, stacklevel=3)
    device, packages, policy = machine.device, machine.packages, policy_named(POLICY)
    return select(problem, device, packages, policy, name, measured=known.measured)


def _asked(problem: MoEProblem, machine: Machine, name: str) -> str:
    decision = _decide(problem, machine, name)
    if not decision.candidates:
        known = [c.backend.name for c in _decide(problem, machine, None).candidates]
        raise UsageError(f"no backend that runs here is called {name!r}; there are {', '.join(known)}")
    if decision.chosen is not None:
        return decision.chosen.backend.runner
    wrong_device = any(v.group == "arch" for c in decision.candidates for v in c.failed)
    kind = Unavailable if wrong_device else NoBackend
    raise kind(decision.error, hint=f"moectl explain CKPT --policy {POLICY} lists every reason")
