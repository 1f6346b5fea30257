"""What would have to change for a backend to be chosen, smallest change first, each answer verified."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, count
from typing import Any

from ..errors import MoectlError, UsageError
from ..oracle.checks import Verdict
from ..oracle.decision import Candidate, Decision
from ..oracle.registry import policy_named
from ..oracle.select import decide
from ..oracle.selection_inputs import SelectionInputs
from .proposed_changes import ProposedChange, new_devices, proposals, proposals_for_failure, request

MOST_DECISIONS = 1500
"""Decisions that one search makes at most."""
MOST_CHANGES = 4
"""Changes that one answer combines at most."""
MOST_ANSWERS = 6
"""Answers that one search gives at most; alternatives of one change count once."""


@dataclass(frozen=True)
class Counterfactual:
    """Changes that together make the backend the chosen one, and the decision that proves it.

    `also` are other values of the last change that do as well.
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
        backend: the name asked for.
        chosen: it is what is chosen already.
        answers: smallest first.
        remaining: why no change helps, a sentence each; empty where one does.
        reason: the same in one sentence, where no candidate's question says it.
        complete: False when the search stopped at `MOST_DECISIONS`.
    """

    backend: str
    chosen: bool
    answers: tuple[Counterfactual, ...]
    remaining: tuple[tuple[Candidate, Verdict], ...]
    complete: bool
    reason: str = ""

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
            "complete": self.complete,
        }


def why(inputs: SelectionInputs, name: str) -> Counterfactuals:
    """What would have to change in `inputs` for backend `name` to be chosen."""
    return _Search(inputs, name).run()


class _Search:
    """Best first: the largest change decides, then the next, as `KINDS` orders them."""

    def __init__(self, start: SelectionInputs, name: str) -> None:
        self.start, self.name, self.policy = start, name, policy_named(start.policy)
        self.wanted = self.policy.meant(name)
        if not self.wanted:
            raise UsageError(
                f"the rules of {start.policy} say nothing of a backend {name!r}",
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
        return Counterfactuals(self.name, False, tuple(self.merged()), remaining, complete, reason)

    def try_request(self) -> None:
        """Asking by name may change the problem itself (padded slices), so it is tried whatever fails."""
        change = request(self.name, self.policy)
        if self.name in self.policy.request_names():
            decision = self.decided(self.changed((change,)))
            if decision is not None and self.reached(decision):
                self.answers.append(Counterfactual((change,), decision))

    def reason(self, first: Decision) -> str:
        """Why nothing helps where no candidate is asked: the row has no such backend, or refuses."""
        policy_rows = self.policy.rows()
        rows = [row for row in policy_rows if self.wanted & {b.name for b in row.backends()}]
        if all(row.name != first.route for row in rows):
            others = "; ".join(dict.fromkeys(row.name for row in rows))
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
        """Changes that are still worth combining: one more than the shortest answer needs."""
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
            self.answers.append(self.smallest(changes, decision))
            return
        slots = {change.slot for change in changes}
        for change in self.next_changes(now, decision):
            if change.slot not in slots:
                self.push((*changes, change))

    def changed(self, changes: Iterable[ProposedChange]) -> SelectionInputs | None:
        """The start with `changes` made, largest first; None when they make no sense together."""
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
        return chosen is not None and decision.usable and chosen.backend.name in self.wanted

    def smallest(self, changes: tuple[ProposedChange, ...], decision: Decision) -> Counterfactual:
        """The answer without changes that it does not need."""
        for kept in range(1, len(changes)):
            for subset in combinations(sorted(changes, key=lambda c: c.size), kept):
                found = self.decided(self.changed(subset))
                if found is not None and self.reached(found):
                    return Counterfactual(subset, found)
        return Counterfactual(tuple(sorted(changes, key=lambda c: -c.size)), decision)

    def next_changes(self, now: SelectionInputs, decision: Decision) -> Iterator[ProposedChange]:
        targets = [c for c in decision.candidates if c.backend.name in self.wanted]
        if now.requested != self.name and self.name in self.policy.request_names():
            ready = not targets or any(c.usable or _only_asked(c) for c in targets)
            if ready:
                yield request(self.name, self.policy)
        if not targets:
            yield from new_devices(now)
        for candidate in targets:
            yield from self.for_candidate(now, decision, candidate)

    def for_candidate(
        self, now: SelectionInputs, decision: Decision, candidate: Candidate
    ) -> Iterator[ProposedChange]:
        """Changes for the failing question that takes the largest change; the others are asked after it.

        A candidate with a question that nothing turns is left alone, and remembered.
        """
        found: list[list[ProposedChange]] = []
        for verdict in candidate.failed:
            if verdict.question == "order":
                continue
            changes = list(proposals(now, candidate, verdict))
            if not changes:
                self.stuck.setdefault((candidate.variant.experts, verdict.question), (candidate, verdict))
                return
            found.append(changes)
        if found:
            yield from max(found, key=lambda changes: min(change.size for change in changes))
        elif decision.gates or decision.error:
            yield from proposals_for_failure(now, candidate, (gate.kind for gate in decision.gates))


def _only_asked(candidate: Candidate) -> bool:
    """True when nothing but the automatic order stands against `candidate`."""
    return all(verdict.question in ("order", "activation filter") for verdict in candidate.failed)


def _shape(answer: Counterfactual) -> tuple[Any, ...]:
    """What answers have in common whose largest change differs in its value only."""
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
