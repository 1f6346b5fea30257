"""Whole numbers in text that a user, a file or a system gives."""

from __future__ import annotations

MOST_DIGITS = 18
"""Digits of a number that fits in 64 bits; Python refuses to convert text of thousands of them."""


def whole_number(text: str, most_digits: int = MOST_DIGITS) -> int | None:
    """The number that ASCII digits `text` spell; None for anything else, or for too many digits.

    Other digits that Python counts as such (superscripts, Arabic-Indic ones) are no numbers here.

    Example:
        >>> whole_number("12"), whole_number("²"), whole_number("-1"), whole_number("9" * 5000)
        (12, None, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= most_digits else None
