"""Lines of text within a width: wrapped prose, labelled values, and tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from unicodedata import east_asian_width

GAP = 2
"""Blanks between the columns of a table."""

FEW_LINES, MOST_LINES = 3, 8
"""Lines of one row beyond which an optional column is left out, and a table becomes labelled lines."""

_NUMBER = re.compile(r"\d (?:[kMGT]?B|[KMGT]iB|[um]?s|TB/s|[a-z0-9]+ TFLOP/s)\b")
"""A number and its unit, which stay on one line."""

Segment = tuple[str, str]
"""Text and its tone."""


def wrap(text: str, room: int, first: str = "", rest: str | None = None) -> list[str]:
    """`text` in lines of `room` columns, broken at blanks alone.

    `first` opens the first line, `rest` (or blanks) the others.

    Example:
        >>> wrap("needs 140 GiB of memory", 12, "- ")
        ['- needs', '  140 GiB of', '  memory']
    """
    lines = textwrap.wrap(
        _kept_together(text),
        room,
        initial_indent=first,
        subsequent_indent=" " * len(first) if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines] or [first.rstrip()]


def _kept_together(text: str) -> str:
    """`text` with no-break spaces between numbers and their units."""
    return _NUMBER.sub(lambda found: found[0].replace(" ", "\u00a0"), text)


def labelled(
    rows: Sequence[tuple[str, str]], room: int, indent: int, tones: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Segment]:
    """Lines of labels and values, without empty values; `tones` are those of labels."""
    shown = [(label, value) for label, value in rows if value]
    wide = max((len(label) for label, _ in shown), default=0)
    before = ""
    for label, value in shown:
        # A repeated label is printed once.
        named = "" if label == before else label
        before = label
        for line in wrap(value, room, f"{'':{indent}}{named:<{wide}}  "):
            yield line, tones.get(label, "")


def text_width(text: str) -> int:
    """Columns of a terminal that `text` takes; wide characters take two."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(c) in "WF") for c in text)


@dataclass(frozen=True)
class Grid:
    """Cells of a table with their column names.

    Attributes:
        rows: as many cells as columns in each.
        right: columns that are right-aligned.
        optional: columns that a narrow terminal leaves out, the first of them first.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Segment, ...], ...]
    right: frozenset[str] = frozenset()
    optional: tuple[str, ...] = ()

    def lines(self, width: int, indent: int = 0) -> Iterator[tuple[Segment, ...]]:
        """The table in lines of at most `width` columns, each a sequence of segments.

        No word is broken: cells are wrapped at blanks; if that does not do, optional columns are left out,
        which the last line says; if that does not do either, each row becomes labelled lines, and a word
        longer than `width` exceeds it.
        """
        grid = self
        for dropped in range(len(self.optional) + 1):
            grid = self._without(self.optional[:dropped])
            most = FEW_LINES if dropped < len(self.optional) else MOST_LINES
            widths = grid._widths(width - indent, most)
            if widths is not None:
                yield from grid._drawn(widths, indent)
                if dropped:
                    names = ", ".join(name for name in self.columns if name in self.optional[:dropped])
                    for line in wrap(
                        f"Left out at this width: {names} (--json has them).", width, " " * indent
                    ):
                        yield ((line, "dim"),)
                return
        yield from self._records(width, indent)

    def markdown(self) -> Iterator[str]:
        """The table in the syntax of markdown, columns aligned."""
        cells = [
            list(self.columns),
            *([text.replace("|", "\\|") for text, _ in row] for row in self.rows),
        ]
        wide = [max(1, *map(text_width, column)) for column in zip(*cells, strict=True)]
        for number, row in enumerate(cells):
            padded = (self._pad(text, i, wide[i]) for i, text in enumerate(row))
            yield f"| {' | '.join(padded)} |"
            if number == 0:
                rules = (
                    "-" * (w + 1) + (":" if self.columns[i] in self.right else "-")
                    for i, w in enumerate(wide)
                )
                yield f"|{'|'.join(rules)}|"

    def _without(self, names: Sequence[str]) -> Grid:
        kept = [i for i, name in enumerate(self.columns) if name not in names]
        return Grid(
            tuple(self.columns[i] for i in kept),
            tuple(tuple(row[i] for i in kept) for row in self.rows),
            self.right,
        )

    def _widths(self, room: int, most: int) -> list[int] | None:
        """Widths of the columns at which rows of at most `most` lines fit into `room`; None without any."""
        room -= GAP * (len(self.columns) - 1)
        columns = [[name, *(row[i][0] for row in self.rows)] for i, name in enumerate(self.columns)]
        widths = [max(map(text_width, column)) for column in columns]
        least = [max(_longest_word(text) for text in column) for column in columns]
        if sum(least) > room:
            return None
        while sum(widths) > room:
            # The widest column that can be narrower.
            widest = max((i for i, width in enumerate(widths) if width > least[i]), key=widths.__getitem__)
            widths[widest] -= 1
        lines = (
            len(wrap(text, width)) for column, width in zip(columns, widths, strict=True) for text in column
        )
        return widths if max(lines, default=0) <= most else None

    def _drawn(self, widths: Sequence[int], indent: int) -> Iterator[tuple[Segment, ...]]:
        head = tuple((name, "strong") for name in self.columns)
        for row in (head, *self.rows):
            wrapped = [wrap(text, width) for (text, _), width in zip(row, widths, strict=True)]
            for parts in zip_longest(*wrapped, fillvalue=""):
                line: list[Segment] = [(" " * indent, "")] if indent else []
                for i, part in enumerate(parts):
                    line.append((self._pad(part, i, widths[i]), row[i][1]))
                    line.append((" " * GAP, ""))
                yield _stripped(line)

    def _pad(self, text: str, column: int, width: int) -> str:
        blanks = " " * (width - text_width(text))
        return blanks + text if self.columns[column] in self.right else text + blanks

    def _records(self, width: int, indent: int) -> Iterator[tuple[Segment, ...]]:
        for row in self.rows:
            for line in wrap(row[0][0], width, " " * indent):
                yield ((line, row[0][1] or "strong"),)
            rest = list(zip(self.columns[1:], row[1:], strict=True))
            tones = {name: tone for name, (_, tone) in rest}
            for line, tone in labelled([(name, text) for name, (text, _) in rest], width, indent + 2, tones):
                yield ((line, tone),)


def _longest_word(text: str) -> int:
    return max(map(text_width, _kept_together(text).split(" ")))


def _stripped(line: Sequence[Segment]) -> tuple[Segment, ...]:
    """`line` without blanks at its end."""
    kept = list(line)
    while kept and not kept[-1][0].strip():
        kept.pop()
    return (*kept[:-1], (kept[-1][0].rstrip(), kept[-1][1])) if kept else ()
