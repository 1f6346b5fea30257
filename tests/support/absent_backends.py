"""What this machine has for backends: which can run here at all, and what the policy's rules refuse."""

from __future__ import annotations

import pytest

from moectl.oracle.registry import policy_named
from moectl.oracle.select import select
from moectl.problem.moe_problem import MoEProblem
from moectl.run import POLICY, RunMachine, this_machine

ABSENT = {"arch", "package"}
"""Groups of reasons that lie in the machine: its GPU is another one, or a library is not installed."""


def refusals(problem: MoEProblem, backend: str, machine: RunMachine) -> dict[str, str]:
    """Why the policy's rules refuse `problem` on `backend` here, by group; empty where it serves."""
    decision = select(problem, machine.device, machine.packages, policy_named(POLICY), backend)
    assert decision.candidates, f"the policy knows no backend {backend}"
    if any(it.usable for it in decision.candidates):
        return {}
    return {why.group: f"{why.question}: {why.wanted}" for it in decision.candidates for why in it.failed}


def skip_if_absent(problem: MoEProblem, backend: str, device: str = "cuda") -> None:
    """Skips, with the reason, when `backend` can run no layer on this machine."""
    told = refusals(problem, backend, this_machine(device))
    if absent := [told[group] for group in sorted(told.keys() & ABSENT)]:
        pytest.skip(f"{backend} is not here: {'; '.join(absent)}")
