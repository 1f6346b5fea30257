"""What would have to change for a backend to be chosen, as blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...explain.why import Answer, Why
from ...oracle.sentences import sentence
from ...ranges import ranges
from ..blocks import Block, Entry, Heading, Line, Listing
from .commands import Asked
from .sections import layers_line

Found = tuple[tuple[tuple[int, ...], Why], ...]
"""Layers with what was found for them."""


def why_blocks(asked: Asked, found: Found) -> Iterator[Block]:
    """The answers for each layer group, equal ones together."""
    groups: dict[str, tuple[list[int], Why]] = {}
    for layers, why in found:
        groups.setdefault(str(why.to_json()), ([], why))[0].extend(layers)
    for numbers, why in groups.values():
        yield Heading(f"what would have to change for {why.backend}: layers {layers_line(tuple(numbers))}")
        yield from _one(asked, why)


def _one(asked: Asked, why: Why) -> Iterator[Block]:
    if why.chosen:
        yield Line(f"Nothing: {why.backend} is chosen.", strong=True)
    elif why.answers:
        yield Listing(tuple(_entry(asked, number, answer) for number, answer in enumerate(why.answers, 1)))
        yield Line("Each answer was checked by deciding again with the change made.")
    else:
        yield Line("Nothing that can be changed helps.", strong=True)
        if why.reason:
            yield Line(f"{why.reason[0].upper()}{why.reason[1:]}.")
        yield Listing(
            tuple(
                Entry("", candidate.variant.experts, (("because", f"it {sentence(verdict)}"),))
                for candidate, verdict in why.remaining
            )
        )
    if not why.complete:
        yield Line("The search was cut short; there may be further answers.")


def _entry(asked: Asked, number: int, answer: Answer) -> Entry:
    chosen = answer.decision.chosen
    largest = max(answer.changes, key=lambda change: change.size)
    # The largest change comes last, with its alternatives.
    ordered = sorted(answer.changes, key=lambda change: change.size)
    also = [change.text for change in answer.also]
    said = [change.text for change in ordered if change is not largest]
    said.append(_alternatives([largest.text, *also]))
    return Entry(
        str(number),
        ", and ".join(said),
        (
            ("gets", chosen.variant.experts if chosen else ""),
            ("check", asked.command(answer.changes)),
        ),
    )


def _alternatives(texts: list[str]) -> str:
    """``use b200 (sm100) or b300 (sm103)``: texts that begin alike say the words they share once."""
    alike: dict[str, list[list[str]]] = {}
    for text in texts:
        alike.setdefault(text.split(" ")[0], []).append(text.split(" "))
    return ", or ".join(_merged(words) for words in alike.values())


def _merged(texts: list[list[str]]) -> str:
    shortest = min(map(len, texts)) - 1
    shared = next((i for i in range(shortest) if len({words[i] for words in texts}) > 1), shortest)
    first, *rest = (" ".join(words[shared:]) for words in texts)
    start = " ".join(texts[0][:shared])
    said = first if not rest else f"{', '.join([first, *rest[:-1]])} or {rest[-1]}"
    return f"{start} {said}".strip()


def why_document(asked: Asked, found: Found) -> list[dict[str, Any]]:
    """The answers for each layer group as plain data, each with the command that checks it."""
    return [
        {
            "layers": list(layers),
            **why.to_json(),
            "answers": [
                {**answer.to_json(), "command": asked.command(answer.changes)} for answer in why.answers
            ],
        }
        for layers, why in found
    ]


def why_lines(asked: Asked, found: Found) -> list[str]:
    """One line a group: layers, and the command that asks for the smallest change."""
    lines = []
    for layers, why in found:
        said = asked.command(why.answers[0].changes) if why.answers else "nothing helps"
        lines.append(f"{ranges(layers)}\t{'chosen' if why.chosen else said}")
    return lines
