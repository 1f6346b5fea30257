"""Documents made of blocks, printed as wrapped text on a terminal or as markdown."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

WIDEST = 100
"""Widest lines of prose, in columns."""


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a section; `level` 1 is the highest."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class TextLine:
    """A paragraph; `strong` if it is the answer, `tone` one of `TONES`."""

    text: str
    strong: bool = False
    tone: str = ""


@dataclass(frozen=True, slots=True)
class LabelledValues:
    """Labelled values, without the empty ones; those of `strong` labels are the answer.

    `tones` are those of labels, each one of `TONES`.
    """

    rows: tuple[tuple[str, str], ...]
    strong: frozenset[str] = frozenset()
    tones: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListingEntry:
    """One entry of a `Listing`: a mark such as its number, a head, and labelled lines below."""

    mark: str
    head: str
    lines: tuple[tuple[str, str], ...] = ()
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of entries."""

    entries: tuple[ListingEntry, ...]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; columns named in `right` are right-aligned."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that markdown folds under `title`; text prints them as they are."""

    title: str
    blocks: tuple[Block, ...]


Block = Heading | TextLine | LabelledValues | Listing | TableBlock | Details

TONES: Mapping[str, str] = {
    "": "",
    "strong": "bold",
    "good": "bold green",
    "wrong": "bold red",
    "warning": "yellow",
    "dim": "dim",
}
"""Styles of the terminal by what a line means."""


def terminal_width() -> int:
    """Width in columns: ``COLUMNS``, the terminal's, or 80."""
    return shutil.get_terminal_size((80, 24)).columns


def draw(blocks: Iterable[Block], console: Any, width: int | None = None) -> None:
    """Prints `blocks` to a rich `console`, prose wrapped to `width` (default: the terminal's)."""
    for text, tone in text_lines(blocks, width or terminal_width()):
        console.print(text, style=TONES[tone], markup=False, soft_wrap=True)


def text_lines(blocks: Iterable[Block], width: int) -> Iterable[tuple[str, str]]:
    """Yields (line, tone); prose fits into `width`, long words and tables may exceed it."""
    room = max(40, min(width, WIDEST))
    first = True
    for block in _joined(blocks):
        if isinstance(block, Heading) and not first:
            yield "", ""
        first = False
        yield from _TEXT[type(block)](block, room)


def _joined(blocks: Iterable[Block]) -> Iterable[Block]:
    """`blocks` with adjacent `LabelledValues` merged, so that their values are aligned."""
    before: Block | None = None
    for block in blocks:
        if isinstance(before, LabelledValues) and isinstance(block, LabelledValues):
            tones = {**before.tones, **block.tones}
            before = LabelledValues((*before.rows, *block.rows), before.strong | block.strong, tones)
            continue
        if before is not None:
            yield before
        before = block
    if before is not None:
        yield before


def _wrap(text: str, room: int, first: str = "", rest: str | None = None) -> list[str]:
    """`text` in lines of `room` columns; `first` opens the first line, `rest` (or blanks) the others."""
    lines = textwrap.wrap(
        _NUMBER.sub(lambda found: found[0].replace(" ", "\u00a0"), text),
        room,
        initial_indent=first,
        subsequent_indent=" " * len(first) if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines] or [first.rstrip()]


_NUMBER = re.compile(r"\d (?:[kMGT]?B|[um]?s|TB/s|[a-z0-9]+ TFLOP/s)\b")
"""A number and its unit, which stay on one line."""


def _heading_text(block: Heading, room: int) -> Iterable[tuple[str, str]]:
    return ((line, "strong") for line in _wrap(block.text, room, rest="  "))


def _line_text(block: TextLine, room: int) -> Iterable[tuple[str, str]]:
    tone = block.tone or ("strong" if block.strong else "")
    return ((line, tone) for line in _wrap(block.text, room, "  "))


def _labelled(
    rows: Sequence[tuple[str, str]], room: int, indent: int, tones: Mapping[str, str] = MappingProxyType({})
) -> Iterable[tuple[str, str]]:
    shown = [(label, value) for label, value in rows if value]
    wide = max((len(label) for label, _ in shown), default=0)
    before = ""
    for label, value in shown:
        # A repeated label is printed once.
        named = "" if label == before else label
        before = label
        for line in _wrap(value, room, f"{'':{indent}}{named:<{wide}}  "):
            yield line, tones.get(label, "")


def _facts_text(block: LabelledValues, room: int) -> Iterable[tuple[str, str]]:
    return _labelled(block.rows, room, 2, {**dict.fromkeys(block.strong, "strong"), **block.tones})


def _listing_text(block: Listing, room: int) -> Iterable[tuple[str, str]]:
    wide = max((len(entry.mark) for entry in block.entries), default=0)
    for entry in block.entries:
        for line in _wrap(entry.head, room, f"  {entry.mark:>{wide}}  "):
            yield line, "strong" if entry.strong else ""
        yield from _labelled(entry.lines, room, wide + 6)


def _grid_text(block: TableBlock, room: int) -> Iterable[tuple[str, str]]:
    wide = [max(len(cells[i]) for cells in (block.columns, *block.rows)) for i in range(len(block.columns))]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            f"{cell:>{w}}" if name in block.right else f"{cell:<{w}}"
            for name, cell, w in zip(block.columns, cells, wide, strict=True)
        )
        return "  " + "  ".join(aligned).rstrip()

    yield line(block.columns), "strong"
    for row in block.rows:
        yield line(row), ""


def _details_text(block: Details, room: int) -> Iterable[tuple[str, str]]:
    yield "", ""
    yield from text_lines(block.blocks, room)


_TEXT: dict[type, Any] = {
    Heading: _heading_text,
    TextLine: _line_text,
    LabelledValues: _facts_text,
    Listing: _listing_text,
    TableBlock: _grid_text,
    Details: _details_text,
}


def markdown(blocks: Iterable[Block]) -> str:
    """`blocks` as GitHub markdown, to paste into an issue.

    Example:
        >>> print(markdown([Heading("GPUs"), LabelledValues((("0", "H200"), ("1", "")))]), end="")
        ### GPUs
        <BLANKLINE>
        - 0: H200
    """
    return "\n\n".join(part for block in _joined(blocks) if (part := _MARKDOWN[type(block)](block))) + "\n"


def _escaped(text: str) -> str:
    """`text` with markdown and HTML characters escaped."""
    for mark in "\\`*<|":
        text = text.replace(mark, f"\\{mark}" if mark != "<" else "&lt;")
    return text


def _facts_markdown(block: LabelledValues) -> str:
    return "\n".join(
        f"- {label}: **{_escaped(value)}**"
        if label in block.strong or block.tones.get(label) == "good"
        else f"- {label}: {_escaped(value)}"
        for label, value in block.rows
        if value
    )


def _listing_markdown(block: Listing) -> str:
    lines = []
    for entry in block.entries:
        head = f"**{_escaped(entry.head)}**" if entry.strong else _escaped(entry.head)
        lines.append(f"- {f'{entry.mark}: ' if entry.mark else ''}{head}")
        lines += [f"  - {label}: {_escaped(text)}" for label, text in entry.lines if text]
    return "\n".join(lines)


def _grid_markdown(block: TableBlock) -> str:
    rule = ["---:" if name in block.right else "---" for name in block.columns]
    rows = (block.columns, rule, *([_escaped(cell) for cell in row] for row in block.rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _details_markdown(block: Details) -> str:
    return f"<details>\n<summary>{_escaped(block.title)}</summary>\n\n{markdown(block.blocks)}\n</details>"


_MARKDOWN: dict[type, Any] = {
    Heading: lambda block: f"{'#' * (block.level + 1)} {_escaped(block.text)}",
    TextLine: lambda block: f"**{_escaped(block.text)}**" if block.strong else _escaped(block.text),
    LabelledValues: _facts_markdown,
    Listing: _listing_markdown,
    TableBlock: _grid_markdown,
    Details: _details_markdown,
}
