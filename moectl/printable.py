"""Text of files, names and libraries made safe to show: what the user's terminal or browser gets of it."""

from __future__ import annotations

import re
from typing import Any

KEPT = "\n\t"
"""Control characters that are shown as they are: lines and columns."""

_OTHERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001345f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
"""Characters that steer a terminal, reorder what stands beside them, break lines where nobody expects it, or
cannot be encoded: those of the Unicode categories Cc, Cf, Cs, Zl and Zp, but for `KEPT`."""


def printable(text: str) -> str:
    r"""`text` with every control, format and surrogate character as its code; line feeds and tabs are kept.

    What is printable already is unchanged, so that a text may pass through here twice.

    Example:
        >>> printable("a\x1b[31m b\u202ec\n")
        'a\\x1b[31m b\\u202ec\n'
    """
    return text if text.isascii() and text.isprintable() else _OTHERS.sub(_code, text)


def printable_line(text: str) -> str:
    r"""`printable` text in one line: a name with a line feed cannot pass for two messages.

    Example:
        >>> printable_line("a\nb\tc")
        'a\\nb\\tc'
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_data(value: Any) -> Any:
    """JSON data with all of its strings `printable`, keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable_data(item) for key, item in value.items()}
    return [printable_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def _code(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
