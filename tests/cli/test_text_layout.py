"""Tables within a width: wrapped at words, without optional columns, or one row below another."""

import io

import pytest
from rich.console import Console

from moectl.cli.text_blocks import Table
from moectl.cli.text_layout import Grid, text_width, wrap

NAMES = ("name", "does", "size")
LONG = "VLLM_FLASHINFER_MOE_BACKEND"


def grid(*rows: tuple[str, ...], columns=NAMES, **others) -> Grid:
    return Grid(columns, tuple(tuple((text, "") for text in row) for row in rows), **others)


def text(made: Grid, width: int, indent: int = 0) -> list[str]:
    return ["".join(part for part, _ in line) for line in made.lines(width, indent)]


SMALL = grid(("a", "one two three four", "1"), ("b", "five", "22"), right=frozenset({"size"}))


def test_a_table_that_fits_is_aligned():
    assert text(SMALL, 80, 2) == [
        "  name  does                size",
        "  a     one two three four     1",
        "  b     five                  22",
    ]


def test_cells_are_wrapped_at_words():
    assert text(SMALL, 20) == [
        "name  does      size",
        "a     one two      1",
        "      three",
        "      four",
        "b     five        22",
    ]


def test_optional_columns_are_left_out_in_their_order_and_this_is_said():
    row = (LONG, "x" * 20, "y" * 20, "z")
    made = grid(row, columns=("name", "first", "second", "last"), optional=("second", "first"))
    assert text(made, 55)[0].split() == ["name", "first", "last"]
    assert text(made, 55)[-1] == "Left out at this width: second (--json has them)."
    assert text(made, 35)[0].split() == ["name", "last"]
    assert "first, second" in " ".join(text(made, 35))


def test_rows_of_what_fits_in_no_way_are_labelled_lines():
    lines = text(grid((LONG, "word " * 60, ""), (LONG, "short", "7")), 40)
    assert lines[0] == LONG
    assert lines[1].startswith("  does  word word")
    assert lines[-2:] == ["  does  short", "  size  7"]
    assert not any("size" in line for line in lines[:-1])


@pytest.mark.parametrize("width", range(30, 130, 7))
def test_no_word_is_ever_broken_and_no_line_too_long(width):
    rows = [(LONG, "activation format of Humming: JSON or a file", "12 GiB"), ("n", "word " * 30, "8 us")]
    lines = text(grid(*rows, optional=("size",)), width)
    assert max(map(text_width, lines)) <= width
    words = " ".join(lines).split()
    assert LONG in words and "Humming:" in words
    assert words.count("word") == 30


def test_numbers_keep_their_units():
    assert wrap("needs 140 GiB of it", 11) == ["needs", "140 GiB of", "it"]
    assert "12 GiB" in "\n".join(text(grid(("a", "b c d e f g", "12 GiB")), 20))


def test_wide_characters_take_two_columns():
    assert text(grid(("表", "b", "1"), ("ab", "c", "2")), 40)[1:] == ["表    b     1", "ab    c     2"]


def test_markdown_is_aligned_and_escapes_bars():
    lines = list(grid(("a|b", "c", "1"), right=frozenset({"size"})).markdown())
    assert lines == ["| name | does | size |", "|------|------|-----:|", "| a\\|b | c    |    1 |"]


def printed(table: Table, width: int, colored: bool = False) -> str:
    stream = io.StringIO()
    Console(
        file=stream, width=width, force_terminal=colored, color_system="standard" if colored else None
    ).print(table)
    return stream.getvalue()


def test_a_console_prints_tones_of_cells():
    table = Table(("backend", "check"), title="results")
    table.add_row("marlin", ("passed", "good"))
    shown = printed(table, 60, colored=True)
    assert "\x1b[1;32mpassed" in shown and "\x1b[1mresults" in shown
    assert printed(table, 60).split("\n")[1:4] == ["results", "backend  check", "marlin   passed"]


def test_the_width_of_the_console_counts():
    table = Table(("backend", "check"))
    table.add_row("marlin", "word " * 20)
    assert max(map(len, printed(table, 50).splitlines())) <= 50
