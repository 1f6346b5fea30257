"""Candidates with every failing question, equal ones merged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...oracle.backend import UNTRIED
from ...oracle.decision import Candidate, Decision
from ...oracle.sentences import reasons
from ..blocks import Entry, Line, Listing

LATER = "would serve, comes later"


@dataclass(frozen=True)
class Row:
    """Neighbouring experts classes of one backend with the same answer."""

    candidates: tuple[Candidate, ...]
    answer: str
    reasons: tuple[tuple[str, str], ...]
    untried: bool = False

    @property
    def first(self) -> Candidate:
        return self.candidates[0]

    @property
    def mark(self) -> str:
        """Numbers in the order asked, from 1."""
        ranks = [candidate.rank + 1 for candidate in self.candidates]
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"

    @property
    def experts(self) -> str:
        """The classes, each once."""
        return ", ".join(dict.fromkeys(c.variant.experts for c in self.candidates))

    @property
    def head(self) -> str:
        """Backend and classes, with the answer where it is not a list of reasons."""
        untried = f", {UNTRIED}" if self.untried else ""
        return (
            f"{self.first.backend.name} ({self.experts}){untried}{f': {self.answer}' if self.answer else ''}"
        )


def answer_of(candidate: Candidate, decision: Decision) -> str:
    """``chosen`` or why it is not, where no question fails; else empty."""
    if decision.chosen is not None and candidate is decision.chosen:
        return "chosen" if decision.usable else "would be chosen, but see above"
    return LATER if candidate.usable else ""


def rows_of(decision: Decision) -> tuple[Row, ...]:
    """The candidates of `decision` in order, merged."""
    found: list[Row] = []
    for candidate in decision.candidates:
        untried = candidate.usable and candidate.backend.untried(decision.inputs.device)
        row = Row((candidate,), answer_of(candidate, decision), reasons(candidate), untried)
        last = found[-1] if found else None
        if (
            last
            and last.first.backend.name == candidate.backend.name
            and (last.answer, last.reasons) == (row.answer, row.reasons)
        ):
            found[-1] = replace(last, candidates=(*last.candidates, candidate))
        else:
            found.append(row)
    return tuple(found)


def elsewhere(row: Row, decision: Decision) -> bool:
    """True when every class of `row` is for other platforms than the decision's device."""
    platform = decision.inputs.device.platform
    return all(
        not c.usable
        and c.variant.offers.arch is not None
        and all(arch.platform != platform for arch in c.variant.offers.arch)
        for c in row.candidates
    )


def listed(rows: Iterable[Row]) -> Listing:
    """`rows` with their reasons."""
    return Listing(
        tuple(Entry(row.mark, row.head, row.reasons, strong=row.answer.startswith("chosen")) for row in rows)
    )


def candidate_blocks(decision: Decision, verbose: bool) -> Iterator[Listing | Line]:
    """The candidates; unless `verbose`, a line for those that come later and one for other platforms."""
    rows = rows_of(decision)
    hidden = [] if verbose else [row for row in rows if elsewhere(row, decision)]
    later = [] if verbose else [row for row in rows if row.answer == LATER]
    yield listed(row for row in rows if row not in hidden and row not in later)
    if later:
        named = ", ".join(f"{row.mark} {replace(row, answer='').head}" for row in later)
        yield Line(f"Would serve too, but come later: {named}.")
    if hidden:
        names = ", ".join(dict.fromkeys(row.first.backend.name for row in hidden))
        yield Line(f"Not for {decision.inputs.device.platform} devices: {names} (-v lists their reasons).")
