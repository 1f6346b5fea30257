"""The text of what changed between two releases of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...explain.release_changes import ChangeGroup, DecisionChange, change_groups
from ..output import count
from ..text_blocks import Block, Heading, Listing, ListingEntry, TextLine

NONE = "no backend"


def release_blocks(
    before: str, after: str, changes: Sequence[DecisionChange], decisions: int, uncovered: int = 0
) -> Iterator[Block]:
    """How many of all `decisions` change, and each kind of change with its causes and where it applies.

    `uncovered` ones were not compared: one side has no rules for them.
    """
    yield Heading(f"from {before} to {after}", 1)
    if uncovered:
        sides = f"{before} or {after} has"
        yield TextLine(f"{count(uncovered, 'decision')} not compared: {sides} no rules for these formats.")
    if not decisions:
        return
    if not changes:
        same = "The decision is" if decisions == 1 else f"All {decisions} decisions are"
        yield TextLine(f"{same} the same.", strong=True)
        return
    verb = "differs" if len(changes) == 1 else "differ"
    some = f"{len(changes)} of {decisions} decisions" if decisions > 1 else "The decision"
    yield TextLine(f"{some} {verb}.", strong=True)
    yield Listing(tuple(map(_entry, change_groups(changes))))


def release_lines(changes: Sequence[DecisionChange]) -> list[str]:
    """A line for each change: checkpoint, GPU, deployment, both backends."""
    return [
        "\t".join((it.checkpoint, it.gpu, _ranks(it), it.before or NONE, it.after or NONE)) for it in changes
    ]


def _entry(group: ChangeGroup) -> ListingEntry:
    head = f"{group.before or NONE} -> {group.after or NONE}, {group.scheme}"
    where: dict[str, dict[str, list[str]]] = {}
    for change in group.changes:
        ranks = where.setdefault(change.gpu, {}).setdefault(change.checkpoint, [])
        if _ranks(change) not in ranks:
            ranks.append(_ranks(change))
    lines = [("because", cause) for cause in group.causes]
    lines += [("reported", effect) for effect in group.reported]
    for gpu, checkpoints in where.items():
        alike: dict[str, list[str]] = {}
        for name, ranks in checkpoints.items():
            alike.setdefault(", ".join(ranks), []).append(name)
        lines.append((gpu, "; ".join(f"{', '.join(names)} ({ranks})" for ranks, names in alike.items())))
    return ListingEntry("", head, tuple(lines), strong=True)


def _ranks(change: DecisionChange) -> str:
    parallel = change.parallel
    words = [f"TP {parallel.tp}"] if parallel.tp > 1 or parallel.ranks == 1 else []
    words += [f"DP {parallel.dp}"] if parallel.dp > 1 else []
    words += ["EP"] if parallel.ep else []
    return " ".join(words)
