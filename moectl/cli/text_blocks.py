"""Documents made of blocks, printed as wrapped text on a terminal or as markdown."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..printable import printable_line
from .text_layout import Grid, Segment, labelled, wrap

WIDEST = 100
"""Widest lines of prose, in columns."""


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a section; `level` 1 is the highest, `tone` one of `TONES`."""

    text: str
    level: int = 2
    tone: str = "strong"


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
    """One entry of a `Listing`: a mark such as its number, a head, and labelled lines below.

    `tone` is that of its head, one of `TONES`; by default `strong` decides.
    """

    mark: str
    head: str
    lines: tuple[tuple[str, str], ...] = ()
    strong: bool = False
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of entries."""

    entries: tuple[ListingEntry, ...]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; columns named in `right` are right-aligned, those in `optional` left out if it is too wide.

    `tones` are those of columns, each one of `TONES`.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    optional: tuple[str, ...] = ()
    tones: Mapping[str, str] = field(default_factory=dict)

    def grid(self) -> Grid:
        """Its cells with their tones."""
        tones = [self.tones.get(name, "") for name in self.columns]
        rows = tuple(tuple(zip(row, tones, strict=True)) for row in self.rows)
        return Grid(self.columns, rows, self.right, self.optional)


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
    """Prints `blocks` to a rich `console`, fitted to `width` (default: the terminal's)."""
    for line in styled_lines(blocks, width or terminal_width()):
        print_segments(line, console)


def print_segments(line: Iterable[Segment], console: Any) -> None:
    """Prints one line to a rich `console` as it is."""
    from rich.text import Text

    styled = ((text, TONES[tone]) for text, tone in line)
    console.print(Text.assemble(*styled), soft_wrap=True)


def text_lines(blocks: Iterable[Block], width: int) -> Iterator[tuple[str, str]]:
    """Yields (line, tone), of a line in several tones the first; longer words than `width` exceed it."""
    for line in styled_lines(blocks, width):
        tone = next((tone for _, tone in line if tone), "")
        yield "".join(text for text, _ in line), tone


def styled_lines(blocks: Iterable[Block], width: int) -> Iterator[tuple[Segment, ...]]:
    """Yields lines as sequences of segments: prose of at most `WIDEST`, tables of `width` columns."""
    width = max(40, width)
    first = True
    for block in _joined(blocks):
        if isinstance(block, Heading) and not first:
            yield ()
        first = False
        if isinstance(block, TableBlock):
            yield from block.grid().lines(width, 2)
        elif isinstance(block, Details):
            yield ()
            yield from styled_lines(block.blocks, width)
        else:
            yield from ((line,) for line in _TEXT[type(block)](block, min(width, WIDEST)))


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


def _heading_text(block: Heading, room: int) -> Iterable[tuple[str, str]]:
    return ((line, block.tone) for line in wrap(block.text, room, rest="  "))


def _line_text(block: TextLine, room: int) -> Iterable[tuple[str, str]]:
    tone = block.tone or ("strong" if block.strong else "")
    return ((line, tone) for line in wrap(block.text, room, "  "))


def _facts_text(block: LabelledValues, room: int) -> Iterable[tuple[str, str]]:
    return labelled(block.rows, room, 2, {**dict.fromkeys(block.strong, "strong"), **block.tones})


def _listing_text(block: Listing, room: int) -> Iterable[tuple[str, str]]:
    wide = max((len(entry.mark) for entry in block.entries), default=0)
    for entry in block.entries:
        for line in wrap(entry.head, room, f"  {entry.mark:>{wide}}  "):
            yield line, entry.tone or ("strong" if entry.strong else "")
        yield from labelled(entry.lines, room, wide + 6)


_TEXT: dict[type, Any] = {
    Heading: _heading_text,
    TextLine: _line_text,
    LabelledValues: _facts_text,
    Listing: _listing_text,
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
    """`text` with markdown and HTML characters escaped, and without no-break spaces."""
    text = text.replace("\u00a0", " ")
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
    # Wide gaps separate parts of a heading, and markdown would show them as one blank.
    Heading: lambda block: f"{'#' * (block.level + 1)} {_escaped(block.text).replace('   ', ', ')}",
    TextLine: lambda block: f"**{_escaped(block.text)}**" if block.strong else _escaped(block.text),
    LabelledValues: _facts_markdown,
    Listing: _listing_markdown,
    TableBlock: _grid_markdown,
    Details: _details_markdown,
}


class Table:
    """A table that a rich console prints: as wide as it is, or in markdown if `piped`.

    `title` stands above it; `first` if nothing is printed before it. For the rest see `Grid`.
    """

    first = False

    def __init__(
        self,
        columns: tuple[str, ...],
        title: str = "",
        right: Iterable[str] = (),
        optional: tuple[str, ...] = (),
        piped: bool = False,
    ) -> None:
        self.columns = columns
        self.title = title
        self.right = frozenset(right)
        self.optional = optional
        self.piped = piped
        self.rows: list[tuple[Segment, ...]] = []

    def add_row(self, *cells: str | Segment) -> None:
        """Adds a row of as many cells as columns; a cell is text, or text and its tone."""
        named = ((cell, "") if isinstance(cell, str) else cell for cell in cells)
        # Before widths are counted; a cell is one line.
        self.rows.append(tuple((printable_line(text), tone) for text, tone in named))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The lines, with a blank one before, unless it is `first`, and after."""
        from rich.text import Text

        grid = Grid(self.columns, tuple(self.rows), self.right, self.optional)
        lines: Iterable[tuple[Segment, ...]] = (
            (((line, ""),) for line in grid.markdown()) if self.piped else grid.lines(options.max_width)
        )
        yield from [] if self.first else [Text()]
        if self.title:
            yield Text(self.title, TONES["strong"])
            yield from [Text()] if self.piped else []
        for line in lines:
            styled = ((text, TONES[tone]) for text, tone in line)
            yield Text.assemble(*styled, no_wrap=True, overflow="ignore")
        yield Text()
