"""The text of what an engine's own code answered, beside moectl's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...explain.engine_answer import AskedGroup, EngineAnswer, FieldDifference
from ..output import count
from ..text_blocks import Block, Heading, LabelledValues
from .text import layers_words

FIELDS: Mapping[str, str] = {
    "selected": "backend",
    "experts_cls": "kernel class",
    "monolithic": "routing fused",
    "padded": "padded sizes",
    "usable": "usable",
    "order": "order",
    "gates": "refusals before any backend",
    "error": "exception",
    "create_weights_error": "exception after the choice",
    "rejected": "refused",
}
"""Fields of recorded decisions, in words."""


def asked_blocks(answer: EngineAnswer) -> Iterator[Block]:
    """Both answers for each group of layers, where they differ, and what the engine was told."""
    yield Heading(f"{answer.title}'s own code")
    for group in answer.groups:
        which = f", {layers_words(group.layers)}" if len(answer.groups) > 1 else ""
        differ = tuple(("differs", difference_words(each)) for each in group.differences)
        yield LabelledValues(
            (
                ("engine", own_words(group) + which),
                ("moectl", our_words(group)),
                *differ,
                ("same", "" if differ else _same(group)),
            ),
            tones={"differs": "wrong", "same": "good"},
        )
    yield LabelledValues((("asked", told(answer)),))


def asked_lines(answer: EngineAnswer) -> list[str]:
    """A line for each group of layers: ``asked``, the engine's backend, whether anything differs."""
    return [
        "\t".join(("asked", str(group.row["selected"]), "differs" if group.differences else "same"))
        for group in answer.groups
    ]


def own_words(group: AskedGroup) -> str:
    """The engine's choice with its class, or its error."""
    row = group.to_json()
    if row["selected"] is None:
        return f"none: {row['error'] or 'no reason given'}"
    error = f", then {row['error']}" if row["error"] else ""
    return f"{row['selected']}{_in_brackets(row['experts'])}{error}"


def our_words(group: AskedGroup) -> str:
    """moectl's choice in the engine's words, or why there is none."""
    chosen = group.decision.chosen
    if chosen is None:
        return str(group.decision)
    error = "" if group.decision.usable else f", {group.decision}"
    return f"{chosen.engine_name}{_in_brackets(chosen.variant.experts)}{error}"


def difference_words(difference: FieldDifference) -> str:
    """``backend: MARLIN, moectl has HUMMING``; of lists and tables, the entries that differ."""
    name, theirs, ours = FIELDS[difference.field], difference.engine, difference.moectl
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        parts = [f"{key} {_listed(theirs[key])}, moectl has {_listed(ours[key])}" for key in theirs]
        changed = [part for key, part in zip(theirs, parts, strict=True) if theirs[key] != ours[key]]
        return f"{name}: {'; '.join(changed)}"
    if difference.field == "rejected" and isinstance(theirs, list) and isinstance(ours, list):
        rows = [(*their, our[-1]) for their, our in zip(theirs, ours, strict=True) if their != our]
        parts = [f"{experts or backend} for {code}, {other}" for backend, experts, code, other in rows]
        return f"{name}: {'; '.join(parts)}"
    return f"{name}: {_listed(theirs)}, moectl has {_listed(ours)}"


def told(answer: EngineAnswer) -> str:
    """Where it ran, and what of the machine it was told."""
    device = "it found the GPU itself" if answer.own_device else "the device's properties are given to it"
    packages = ", and the packages: its compiled files are not there" if answer.bare else ""
    return f"{answer.python}; {device}{packages}"


def _same(group: AskedGroup) -> str:
    refusals = count(len(group.row["rejected"]), "refusal")
    return f"backend, class, sizes, order, exceptions, {refusals}"


def _in_brackets(text: str | None) -> str:
    return f" ({text})" if text else ""


def _listed(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value in (None, "") else str(value)
