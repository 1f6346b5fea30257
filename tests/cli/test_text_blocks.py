"""Blocks as wrapped text and as markdown."""

import pytest

from moectl.cli.text_blocks import (
    Heading,
    LabelledValues,
    Listing,
    ListingEntry,
    TableBlock,
    TextLine,
    markdown,
    text_lines,
)

WORDS = " ".join(["word"] * 60)
EVERY = (
    Heading("a heading " + WORDS),
    TextLine("a line " + WORDS, strong=True),
    LabelledValues((("label", WORDS), ("empty", "")), strong=frozenset({"label"})),
    Listing(
        (ListingEntry("1-2", "head " + WORDS, (("arch", WORDS), ("arch", "again"))), ListingEntry("3", "x"))
    ),
    TableBlock(("name", "number"), (("a|b", "1"), ("c", "22")), frozenset({"number"})),
)


@pytest.mark.parametrize("width", [40, 80, 100, 300])
def test_text_stays_inside_its_columns(width):
    lines = [text for text, _ in text_lines(EVERY, width)]
    assert max(map(len, lines)) <= min(width, 100)
    assert sum(line.count("word") for line in lines) == 60 * 5


def test_labels_stand_once_and_empty_values_not_at_all():
    text = "\n".join(line for line, _ in text_lines(EVERY, 80))
    assert text.count("arch") == 1
    assert "empty" not in text
    assert "again" in text


def test_numbers_are_aligned_to_the_right():
    lines = [text for text, _ in text_lines(EVERY[-1:], 80)]
    assert lines == ["  name  number", "  a|b        1", "  c         22"]


def test_markdown_draws_no_boxes_and_keeps_bars_in_cells():
    text = markdown(EVERY)
    assert text.startswith("### a heading")
    assert "| a\\|b | 1 |" in text
    assert "| --- | ---: |" in text
    assert "- label: **word" in text
    assert not set(text) & set("│─┌└")


def test_parts_of_a_heading_are_separated_in_markdown():
    assert markdown([Heading("org/name   1x H100   vLLM", 1)]) == "## org/name, 1x H100, vLLM\n"
