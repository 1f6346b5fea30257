"""How a choice stands, in one sentence: why nothing serves, or what it falls back from."""

from __future__ import annotations

from collections.abc import Iterator

from ...explain import GroupExplanation
from ...oracle.decision import Candidate, Decision
from ...oracle.registry import policy_named
from ...oracle.sentences import sentence

CLOSEST = 3
"""Candidates named where nothing serves."""


def fallback_words(answer: GroupExplanation) -> str:
    """Why nothing serves, or what the choice falls back from; empty where it is no fallback."""
    fallback, decision = answer.fallback, answer.decision
    if fallback is None:
        return ""
    if fallback.kind == "none":
        return failure(decision)
    if fallback.kind == "request":
        name = str(decision.inputs.requested)
        meant = policy_named(decision.inputs.policy).meant(name)
        failing = [c for c in decision.candidates if c.failed and c.backend.name in meant]
        nearest = min(failing, key=lambda c: len(c.failed), default=None)
        return f"{name} was asked for, but {_lacks(nearest) if nearest else 'is not what runs'}"
    if fallback.kind == "emulation":
        return "emulation decodes the weights and multiplies in 16 bits: slow"
    assert fallback.candidate is not None
    said = "; ".join(dict.fromkeys(sentence(verdict) for verdict in fallback.verdicts))
    return f"{fallback.candidate.backend.name} comes before it and fits, but {said}"


def refusals(decision: Decision) -> Iterator[str]:
    """What stands against `decision`, a sentence each; of a request by name, what its nearest class lacks."""
    yield from map(str, decision.gates)
    asked = decision.inputs.requested if decision.chosen is None and not decision.gates else None
    if asked and decision.candidates:
        nearest = min(decision.candidates, key=lambda c: len(c.failed))
        yield f"{asked} was asked for by name, but it {_lacks(nearest)}"
    elif decision.error:
        yield decision.error


def _lacks(candidate: Candidate) -> str:
    return "; ".join(dict.fromkeys(map(sentence, candidate.failed)))


def failure(decision: Decision) -> str:
    """Why nothing serves: the engine's refusals, or the candidates that come closest with their reasons."""
    if decision.gates:
        return "; ".join(map(str, decision.gates))
    if decision.chosen is not None:
        return f"{decision.chosen.backend.name} would be chosen, but {decision.error}"
    near = [c for c in decision.candidates if "arch" not in c.reasons()]
    near = sorted(near, key=lambda c: len(c.failed))[:CLOSEST]
    if not near:
        return f"no candidate of {decision.route} serves {decision.inputs.device.arch}"
    said = (f"{c.backend.name} {_lacks(c)}" for c in near)
    return ". ".join(dict.fromkeys(said))
