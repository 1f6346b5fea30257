"""Decisions in sentences: why one was made, what it is a fallback from, why there is no backend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..oracle.backend import UNTRIED
from ..oracle.decision import Candidate, Decision
from ..oracle.registry import engine_named, policy_named
from ..oracle.select import PLATFORMS
from ..oracle.verdict_sentences import makers_spelling, predicate, sentence
from .fallback import serves_request, slower_preference

if TYPE_CHECKING:
    from .explanation import GroupExplanation


def usual_name(decision: Decision, candidate: Candidate) -> str:
    """What the field calls the candidate's kernels; the engine's name of the backend if that says it."""
    name = engine_named(decision.inputs.policy).kernel_name(candidate.variant.experts)
    return name or candidate.backend.name


def verification_words(decision: Decision, candidate: Candidate) -> str:
    """On what hardware moectl verified a backend with such a layer; empty for an engine's own backends.

    If not on the decision's device: that, and on what it did.
    """
    backend, scheme = candidate.backend, decision.problem.scheme
    archs = map(str, backend.verified_with(scheme))
    where = " and ".join(PLATFORMS.get(arch, makers_spelling(arch)) for arch in archs)
    if not backend.untried(decision.inputs.device, scheme):
        return f"verified on {where}" if where else ""
    return f"{UNTRIED} other than {where}" if where else UNTRIED


def because(decision: Decision) -> str:
    """The one reason for the choice, or for none."""
    return reason_words(decision) if decision.usable else "; ".join(refusals(decision))


def remark(answer: GroupExplanation) -> str:
    """What a table says of an answer below it: no backend, a fallback, or warnings."""
    return ". ".join(filter(None, (fallback_words(answer), *answer.decision.warnings)))


def reason_words(decision: Decision) -> str:
    """Why the chosen candidate was chosen, in one line."""
    chosen = decision.chosen
    assert chosen is not None
    if chosen.assigned:
        return "the engine's method for this format assigns it on this device without checking others"
    if serves_request(decision, policy_named(decision.inputs.policy)):
        return "requested by name; all checks pass"
    if decision.ranking is not None:
        return str(decision.ranking)
    if decision.arguments is not None and decision.arguments.why:
        return f"{makers_spelling(decision.arguments.why)}; all checks pass"
    moves = "; ".join(_deciding_moves(decision, chosen))
    special = f" ({moves})" if moves else ""
    if any(candidate.rank < chosen.rank for candidate in decision.candidates):
        arch = makers_spelling(decision.inputs.device.arch)
        return f"highest priority of those that pass all checks on {arch}{special}"
    return f"highest priority; all checks pass{special}"


def _deciding_moves(decision: Decision, chosen: Candidate) -> Iterator[str]:
    """Why the engine's priority order is not the usual one, where that decides.

    A backend that moved up does if it is the chosen one; one that moved down, if it is supported and has
    lower priority than the chosen one.
    """
    lower = {c.backend.name for c in decision.candidates if c.usable and c.rank > chosen.rank}
    routes = [row for row in policy_named(decision.inputs.policy).rows() if row.name == decision.route]
    for move in dict.fromkeys(move for route in routes for move in route.moves):
        down = move.after is not None or move.last
        decides = move.backend.name in lower if down else move.backend is chosen.backend
        if move.why in decision.notes and decides:
            yield move.why


CLOSEST = 3
"""Candidates to name if no backend is supported."""


def fallback_words(answer: GroupExplanation) -> str:
    """Why there is no backend, or what the choice is a fallback from; empty if it is not a fallback."""
    fallback, decision = answer.fallback, answer.decision
    if fallback is None:
        return ""
    if fallback.kind == "none":
        return failure(decision)
    if fallback.kind == "request":
        name = str(decision.inputs.requested)
        requested = policy_named(decision.inputs.policy).requested_backends(name)
        failing = [c for c in decision.candidates if c.failed and c.backend.name in requested]
        nearest = min(failing, key=lambda c: len(c.failed), default=None)
        return f"{name} was requested, but {_lacks(nearest) if nearest else 'is not what runs'}"
    if fallback.kind == "emulation":
        return "emulation dequantizes the weights and multiplies in 16 bits: slow"
    assert fallback.candidate is not None
    missing = ", and ".join(dict.fromkeys(sentence(verdict) for verdict in fallback.verdicts))
    if fallback.kind == "method":
        return (
            f"{decision.method} replaces {fallback.method}, whose {fallback.candidate.backend.name} has "
            f"higher priority and fits this GPU, but {missing}"
        )
    return f"{fallback.candidate.backend.name} has higher priority and fits, but {missing}"


def slower_words(decision: Decision) -> str:
    """That the engine would take emulation if it had what that needs; empty if not."""
    candidate = slower_preference(decision)
    if candidate is None:
        return ""
    lacks = re.sub(r" \(pip install [^)]*\)", "", _lacks(candidate))
    return f"emulation has higher priority but {lacks}; it would be slower, so this is no fallback"


def refusals(decision: Decision) -> Iterator[str]:
    """Why `decision` has no backend, in sentences; for a request, the failed checks of its nearest class."""
    yield from map(str, decision.gates)
    unmet = decision.chosen is None and not decision.gates and not decision.refused
    requested = decision.inputs.requested if unmet else None
    nearest = min(decision.candidates, key=lambda c: len(c.failed), default=None)
    if requested and nearest is not None and nearest.failed:
        yield f"{requested} was requested by name, but it {_lacks(nearest)}"
    elif decision.error:
        yield decision.error


def _lacks(candidate: Candidate) -> str:
    return ", and ".join(dict.fromkeys(map(predicate, candidate.failed)))


def _by_name_only(candidate: Candidate) -> bool:
    return any(verdict.question == "order" for verdict in candidate.failed)


def failure(decision: Decision) -> str:
    """Why there is no backend: the engine's refusals, or the nearest candidates with their reasons."""
    if decision.gates:
        return "; ".join(map(str, decision.gates))
    if decision.chosen is not None:
        return f"{decision.chosen.backend.name} would be chosen, but {decision.error}"
    if decision.error and (decision.refused or any(c.usable for c in decision.candidates)):
        return decision.error
    fitting = sorted(
        (c for c in decision.candidates if "arch" not in c.reasons()), key=lambda c: len(c.failed)
    )
    near = [c for c in fitting if not _by_name_only(c)][:CLOSEST]
    sentences = [f"{c.backend.name} {_lacks(c)}" for c in near]
    if not near:
        arch = makers_spelling(decision.inputs.device.arch)
        by_name = [f"{c.backend.name} {_lacks(c)}" for c in fitting if len(c.failed) == 1]
        sentences = [f"no candidate of {decision.route} supports {arch}", *by_name[:1]]
    return ". ".join(dict.fromkeys(sentences))
