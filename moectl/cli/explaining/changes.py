"""What changed between two explanations, as blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...explain.diff import Cause, Difference, GroupDifference
from ...oracle.checks import Verdict
from ...oracle.sentences import sentence
from ..blocks import Block, Entry, Facts, Heading, Line, Listing
from .sections import layers_line


def difference_blocks(found: Difference) -> Iterator[Block]:
    """Inputs that changed, then each group's choice with the rules that did it."""
    yield Heading("what changed", 1)
    if found.empty:
        yield Line("Nothing: inputs, choices, order and verdicts are the same.", strong=True)
        return
    if not found.chosen_otherwise:
        yield Line("Every layer gets what it got before.", strong=True)
    if found.inputs:
        yield Facts(
            tuple((change.path, f"{_value(change.old)} -> {_value(change.new)}") for change in found.inputs)
        )
    for layers, when in ((found.only_old, "before"), (found.only_new, "now")):
        if layers:
            yield Line(f"Layers {layers_line(layers)} are there only {when}.")
    for group in found.groups:
        yield from _group(group)


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "absent" if value is None else str(value) or "present"


def _choice(choice: tuple[str, str] | None) -> str:
    return f"{choice[0]} ({choice[1]})" if choice else "no backend"


def _cause(cause: Cause) -> str:
    return " ".join([cause.says, *filter(None, ["; ".join(dict.fromkeys(map(sentence, cause.verdicts)))])])


def _places(old: int, new: int) -> str:
    if not old or not new:
        return f"is new, at place {new}" if new else f"is gone, it was at place {old}"
    return f"goes from place {old} to {new}"


def _group(group: GroupDifference) -> Iterator[Block]:
    yield Heading(f"layers {layers_line(group.layers)}")
    if group.old_choice != group.new_choice:
        rows = [("choice", f"{_choice(group.old_choice)} -> {_choice(group.new_choice)}")]
        rows += [("because", _cause(rule)) for rule in group.rules]
        yield Facts(tuple(rows), strong=frozenset({"choice"}))
    yield Facts(
        tuple(
            ("order", f"{move.backend} ({move.experts}) {_places(move.old, move.new)}")
            for move in group.moved
        )
    )
    if group.failures and group.old_choice == group.new_choice:
        yield Facts(tuple(zip(("failed with", "fails with"), group.failures, strict=True)))
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for change in group.candidates:
        name = f"{change.backend} ({change.experts})"
        alike.setdefault(_verdicts(change.old, change.new), []).append(name)
    if alike:
        yield Heading("verdicts that changed", 3)
        yield Listing(tuple(Entry("", ", ".join(names), lines) for lines, names in alike.items()))


def _verdicts(old: Sequence[Verdict], new: Sequence[Verdict]) -> tuple[tuple[str, str], ...]:
    return tuple(
        dict.fromkeys(
            (label, sentence(verdict))
            for label, verdicts in (("no more", old), ("now", new))
            for verdict in verdicts
        )
    )
