"""Whether a choice is a fallback, for `--strict` and matrices."""

from __future__ import annotations

from dataclasses import dataclass

from ..oracle.checks import Verdict
from ..oracle.decision import Candidate, Decision
from ..oracle.policy import Policy
from ..oracle.select import select

EMULATION = "emulation"
_APART = frozenset({"order", "activation filter", "token format"})
"""Questions that only separate candidates for other requests, activations or exchanges: failing one
is not a fallback."""


@dataclass(frozen=True)
class Fallback:
    """Why a choice is a fallback: `kind` is ``none``, ``request``, ``emulation``, ``passed`` or ``method``.

    ``passed``: `candidate` has higher priority and fits the GPU and the format, but fails `verdicts`.
    ``method``: the engine's usual `method` for the checkpoint has such a candidate, but the engine uses
    another method, without it, because of `verdicts`.
    """

    kind: str
    candidate: Candidate | None = None
    verdicts: tuple[Verdict, ...] = ()
    method: str = ""


def fallback_of(decision: Decision, policy: Policy) -> Fallback | None:
    """Why `decision` is a fallback; None if it is the best for the GPU and the format.

    A fallback is no backend at all, another backend than requested, emulation, a choice although a
    candidate of another backend has higher priority and supports the device and the format, or such a
    candidate that only the engine's usual method for the checkpoint has. Emulation is slower than any
    choice, and no such candidate (`slower_preference`).
    """
    chosen = decision.chosen
    if chosen is None or not decision.usable:
        return Fallback("none")
    if decision.inputs.requested not in (None, "", "auto"):
        return None if serves_request(decision, policy) else Fallback("request")
    if chosen.backend.name == EMULATION:
        return Fallback("emulation")
    for candidate in decision.candidates:
        if candidate.rank >= chosen.rank:
            break
        if candidate.usable and decision.ranking is not None:
            continue  # usable, but measured to be slower
        others = (chosen.backend.name, EMULATION)
        if candidate.backend.name not in others and _fits(candidate):
            return Fallback("passed", candidate, candidate.failed)
    return _worse_method(decision, policy, chosen)


def slower_preference(decision: Decision) -> Candidate | None:
    """Emulation that the engine prefers to its choice, if that lacks only packages or switches."""
    chosen = decision.chosen
    if chosen is None or not decision.usable or decision.inputs.requested not in (None, "", "auto"):
        return None
    before = (c for c in decision.candidates if c.rank < chosen.rank and c.backend.name == EMULATION)
    return next((c for c in before if c.failed and _fits(c)), None)


def _worse_method(decision: Decision, policy: Policy, chosen: Candidate) -> Fallback | None:
    """The better candidate of the method that the decision's one replaces; None if there is none."""
    inputs = decision.inputs
    for route in policy.replaced(decision.route, inputs.problem):
        usual = select(inputs.problem, inputs.device, inputs.packages, policy.only_route(route.name))
        for candidate in usual.candidates:
            if candidate.backend.name == chosen.backend.name:
                break
            if _fits(candidate):
                return Fallback("method", candidate, candidate.failed, route.method)
    return None


def serves_request(decision: Decision, policy: Policy) -> bool:
    """True when a backend was requested by name and is what was chosen."""
    chosen, requested = decision.chosen, decision.inputs.requested
    if chosen is None or decision.ignored or requested in (None, "", "auto"):
        return False
    return chosen.backend.name in policy.requested_backends(str(requested))


def _fits(candidate: Candidate) -> bool:
    """True when the candidate supports the device and the format, and is intended for this use."""
    return not any(
        verdict.group in ("arch", "scheme") or verdict.question in _APART for verdict in candidate.failed
    )
