"""What would have to change for a backend to be chosen: smallest changes first, each answer verified."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, count
from typing import Any

from ..errors import MoectlError, UsageError
from ..oracle.checks import Verdict
from ..oracle.decision import DEPLOYMENT, Candidate, Decision
from ..oracle.registry import policy_named
from ..oracle.select import decide
from ..oracle.selection_inputs import SelectionInputs
from ..oracle.verdict_sentences import sentence
from .decision_words import reason_words
from .proposed_changes import (
    ProposedChange,
    new_devices,
    other_deployments,
    other_shards,
    proposals,
    proposals_for_failure,
    request,
)

MOST_DECISIONS = 1500
"""Maximum decisions per search."""
MOST_CHANGES = 4
"""Maximum changes combined in one answer."""
MOST_ANSWERS = 6
"""Maximum answers per search; alternatives of one change count once."""
MOST_ROUTES = 10
"""Maximum formats to name that a backend is for."""


@dataclass(frozen=True)
class Counterfactual:
    """Changes that together make the backend the chosen one, and the decision that verifies it.

    `also` are alternative values of the last change.
    """

    changes: tuple[ProposedChange, ...]
    decision: Decision
    also: tuple[ProposedChange, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        chosen = self.decision.chosen
        return {
            "changes": [
                {"kind": c.kind, "text": c.text, "options": [list(pair) for pair in c.options]}
                for c in self.changes
            ],
            "also": [{"kind": c.kind, "text": c.text} for c in self.also],
            "experts": chosen.variant.experts if chosen else None,
            "device": self.decision.inputs.device.name,
        }


@dataclass(frozen=True)
class Counterfactuals:
    """The answers for one backend and one layer group.

    Attributes:
        backend: the backend's name.
        chosen: it is already the chosen one.
        answers: smallest changes first.
        remaining: verdicts that no change turns; empty if there are answers.
        reason: why no change helps, if no verdict says it.
        complete: False when the search stopped at `MOST_DECISIONS`.
        instead: the backend that is chosen; empty without one.
        why_not: why it is not the backend that was asked about, by backend: a request may mean several.
    """

    backend: str
    chosen: bool
    answers: tuple[Counterfactual, ...]
    remaining: tuple[tuple[Candidate, Verdict], ...]
    complete: bool
    reason: str = ""
    instead: str = ""
    why_not: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "backend": self.backend,
            "chosen": self.chosen,
            "answers": [answer.to_json() for answer in self.answers],
            "remaining": [
                {
                    "experts": c.variant.experts,
                    "question": v.question,
                    "wanted": v.wanted,
                    "offered": v.offered,
                }
                for c, v in self.remaining
            ],
            "reason": self.reason or None,
            "instead": self.instead or None,
            "why_not": [{"backend": backend, "reason": reason} for backend, reason in self.why_not],
            "complete": self.complete,
        }


def why(inputs: SelectionInputs, name: str) -> Counterfactuals:
    """What would have to change in `inputs` for backend `name` to be chosen."""
    return _Search(inputs, name).run()


class _Search:
    """Best-first search: by the largest change, then the next, in the order of `KINDS`."""

    def __init__(self, start: SelectionInputs, name: str) -> None:
        self.start, self.name, self.policy = start, name, policy_named(start.policy)
        self.targets = self.policy.requested_backends(name)
        if not self.targets:
            raise UsageError(
                f"the rules of {start.policy} have no backend {name!r}",
                hint=f"choose one of {', '.join(self.policy.request_names())}",
            )
        self.decisions = 0
        self.order = count()
        self.seen: set[frozenset[tuple[str, str]]] = set()
        self.queue: list[tuple[tuple[int, ...], int, tuple[ProposedChange, ...]]] = []
        self.answers: list[Counterfactual] = []
        self.stuck: dict[tuple[str, str], tuple[Candidate, Verdict]] = {}

    def run(self) -> Counterfactuals:
        first = decide(self.start)
        if self.reached(first):
            return Counterfactuals(self.name, True, (), (), True)
        self.try_request()
        self.push(())
        while self.queue and self.decisions < MOST_DECISIONS and len(self.merged()) < MOST_ANSWERS:
            _, _, changes = heapq.heappop(self.queue)
            if len(changes) <= self.longest() and not self.covered(changes):
                self.visit(changes)
        complete = not self.queue or len(self.merged()) >= MOST_ANSWERS
        remaining = () if self.answers else tuple(self.stuck.values())
        reason = "" if self.answers or remaining else self.reason(first)
        instead = first.chosen.backend.name if first.chosen and first.usable else ""
        return Counterfactuals(
            self.name,
            False,
            tuple(self.merged()),
            remaining,
            complete,
            reason,
            instead,
            tuple(self.why_not(first, instead)),
        )

    def why_not(self, first: Decision, instead: str) -> Iterator[tuple[str, str]]:
        """The backends asked about, each with what its best candidate lacks."""
        if first.gates:
            yield self.name, "; ".join(map(str, first.gates))
            return
        if first.refused:
            yield self.name, f"is not asked: {first.error}"
            return
        nearest: dict[str, Candidate] = {}
        for candidate in first.candidates:
            name = candidate.backend.name
            if name in self.targets and len(candidate.failed) < len(nearest.get(name, candidate).failed) + (
                name not in nearest
            ):
                nearest[name] = candidate
        if not nearest and self.answers and instead:
            yield self.name, f"is not tried: {instead} is the choice ({reason_words(first)})"
        failing = {name: {v.question for v in candidate.failed} for name, candidate in nearest.items()}
        for name, candidate in nearest.items():
            if any(questions < failing[name] for questions in failing.values()):
                continue  # lacks all that another one lacks, and more
            if candidate.usable:
                higher = f", but {instead} has higher priority" if instead else ""
                yield name, f"passes all checks{higher}"
            else:
                yield name, ", and ".join(dict.fromkeys(map(sentence, candidate.failed)))

    def try_request(self) -> None:
        """Try the request by name first: it may change the problem itself (padded shards)."""
        change = request(self.name, self.policy)
        if self.name in self.policy.request_names():
            decision = self.decided(self.changed((change,)))
            if decision is not None and self.reached(decision):
                self.answers.append(Counterfactual((change,), decision))

    def reason(self, first: Decision) -> str:
        """Why nothing helps if no candidate was checked: the route lacks the backend, or refuses."""
        policy_rows = self.policy.rows()
        rows = [row for row in policy_rows if self.targets & {b.name for b in row.backends()}]
        if all(row.name != first.route for row in rows):
            names = list(dict.fromkeys(row.name for row in rows))
            more = f" and {len(names) - MOST_ROUTES} more" if len(names) > MOST_ROUTES else ""
            others = "; ".join(names[:MOST_ROUTES]) + more
            return f"this checkpoint is read as {first.route}, and {self.name} is a backend for {others}"
        by_name = decide(replace(self.start, requested=self.name))
        return "; ".join([*map(str, by_name.gates), *([str(by_name.error)] if by_name.error else [])])

    def push(self, changes: tuple[ProposedChange, ...]) -> None:
        key = frozenset((c.slot, c.text) for c in changes)
        if key not in self.seen and len(changes) <= self.longest():
            self.seen.add(key)
            sizes = tuple(sorted((c.size for c in changes), reverse=True))
            heapq.heappush(self.queue, (sizes, next(self.order), changes))

    def longest(self) -> int:
        """Maximum changes still worth combining: one more than in the shortest answer."""
        return min([MOST_CHANGES, *(len(answer.changes) + 1 for answer in self.answers)])

    def covered(self, changes: tuple[ProposedChange, ...]) -> bool:
        """True when an answer needs only some of `changes`."""
        return any(set(answer.changes) <= set(changes) for answer in self.answers)

    def visit(self, changes: tuple[ProposedChange, ...]) -> None:
        now = self.changed(changes)
        decision = self.decided(now)
        if now is None or decision is None:
            return
        if self.reached(decision):
            answer = self.smallest(changes, decision)
            shapes = {_shape(other) for other in self.answers}
            if len(answer.changes) == len(changes) or _shape(answer) not in shapes:
                self.answers.append(answer)
            return
        slots = {change.slot for change in changes}
        for change in self.next_changes(now, decision):
            if change.slot not in slots:
                self.push((*changes, change))

    def changed(self, changes: Iterable[ProposedChange]) -> SelectionInputs | None:
        """The start with `changes` made, largest first; None if they contradict each other."""
        now = self.start
        try:
            for change in sorted(changes, key=lambda c: -c.size):
                now = change.apply(now)
        except MoectlError:
            return None
        return now

    def decided(self, now: SelectionInputs | None) -> Decision | None:
        if now is None:
            return None
        self.decisions += 1
        try:
            return decide(now)
        except MoectlError:
            # No rule covers the changed input, so it is no answer.
            return None

    def merged(self) -> list[Counterfactual]:
        return list(_merged(self.answers))

    def reached(self, decision: Decision) -> bool:
        chosen = decision.chosen
        return chosen is not None and decision.usable and chosen.backend.name in self.targets

    def smallest(self, changes: tuple[ProposedChange, ...], decision: Decision) -> Counterfactual:
        """The answer without unnecessary changes."""
        for kept in range(1, len(changes)):
            for subset in combinations(sorted(changes, key=lambda c: c.size), kept):
                smaller = self.decided(self.changed(subset))
                if smaller is not None and self.reached(smaller):
                    return Counterfactual(subset, smaller)
        return Counterfactual(tuple(sorted(changes, key=lambda c: -c.size)), decision)

    def next_changes(self, now: SelectionInputs, decision: Decision) -> Iterator[ProposedChange]:
        targets = [c for c in decision.candidates if c.backend.name in self.targets]
        if now.requested != self.name and self.name in self.policy.request_names():
            ready = not targets or any(c.usable or _only_asked(c) for c in targets)
            if ready:
                yield request(self.name, self.policy)
        if any(gate.kind == DEPLOYMENT for gate in decision.gates):
            yield from other_deployments(now)
        replaced = self.policy.replaced(decision.route, now.problem)
        if any(backend.name in self.targets for route in replaced for backend in route.backends()):
            yield from other_shards(now)
        elif not targets:
            yield from new_devices(now)
        for candidate in targets:
            yield from self.for_candidate(now, decision, candidate)

    def for_candidate(
        self, now: SelectionInputs, decision: Decision, candidate: Candidate
    ) -> Iterator[ProposedChange]:
        """Changes for the failing question that needs the largest change; other questions follow later.

        A candidate with a question that no change turns is skipped and remembered.
        """
        per_question: list[list[ProposedChange]] = []
        for verdict in candidate.failed:
            if verdict.question == "order":
                continue
            changes = list(proposals(now, candidate, verdict))
            if not changes:
                self.stuck.setdefault((candidate.variant.experts, verdict.question), (candidate, verdict))
                return
            per_question.append(changes)
        if per_question:
            yield from max(per_question, key=lambda changes: min(change.size for change in changes))
        elif decision.gates or decision.error:
            yield from proposals_for_failure(now, candidate, (gate.kind for gate in decision.gates))


def _only_asked(candidate: Candidate) -> bool:
    """True when only the automatic order excludes `candidate`."""
    return all(verdict.question in ("order", "activation filter") for verdict in candidate.failed)


def _shape(answer: Counterfactual) -> tuple[Any, ...]:
    """A key for answers that differ only in the value of their largest change."""
    changes = sorted(answer.changes, key=lambda c: -c.size)
    chosen = answer.decision.chosen
    experts = chosen.variant.experts if chosen else ""
    return (changes[0].kind, changes[0].slot, frozenset((c.slot, c.text) for c in changes[1:]), experts)


def _merged(answers: Iterable[Counterfactual]) -> Iterator[Counterfactual]:
    groups: dict[tuple[Any, ...], list[Counterfactual]] = {}
    for answer in answers:
        groups.setdefault(_shape(answer), []).append(answer)
    for same in groups.values():
        also = tuple(max(other.changes, key=lambda c: c.size) for other in same[1:])
        yield Counterfactual(same[0].changes, same[0].decision, also)
