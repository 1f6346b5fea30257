"""Whether a choice is a fallback: what `--strict` and matrices point at."""

from __future__ import annotations

from dataclasses import dataclass

from ..oracle.checks import Verdict
from ..oracle.decision import Candidate, Decision
from ..oracle.policy import Policy

EMULATION = "emulation"
_APART = frozenset({"order", "activation filter", "token format"})
"""Questions that tell candidates meant for other requests, activations or exchanges apart: failing one
is no loss."""


@dataclass(frozen=True)
class Fallback:
    """Why a choice is not what it might be: `kind` is ``none``, ``request``, ``emulation`` or ``passed``.

    ``passed``: `candidate` stands before the choice, fits the GPU and the format, and fails `verdicts`.
    """

    kind: str
    candidate: Candidate | None = None
    verdicts: tuple[Verdict, ...] = ()


def fallback_of(decision: Decision, policy: Policy) -> Fallback | None:
    """The reason why `decision` is a fallback; None when it is the best that the GPU and the format allow.

    A fallback is no backend at all, a request by name that is not what runs, emulation, or a choice with
    a candidate of another backend before it whose device and format questions hold.
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
            continue  # it can serve, and was measured to be slower
        if candidate.backend.name != chosen.backend.name and _fits(candidate):
            return Fallback("passed", candidate, candidate.failed)
    return None


def serves_request(decision: Decision, policy: Policy) -> bool:
    """True when a backend was asked for by name, and that is what is chosen for the asking."""
    chosen, requested = decision.chosen, decision.inputs.requested
    if chosen is None or decision.ignored or requested in (None, "", "auto"):
        return False
    return chosen.backend.name in policy.meant(str(requested))


def _fits(candidate: Candidate) -> bool:
    """True when neither the device nor the format, nor the use it is meant for, speaks against it."""
    return not any(
        verdict.group in ("arch", "scheme") or verdict.question in _APART for verdict in candidate.failed
    )
