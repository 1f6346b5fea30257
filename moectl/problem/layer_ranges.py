"""Short spelling of lists of layer numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers with runs abbreviated.

    Example:
        >>> ranges({5, 0, 1, 2})
        '0-2, 5'
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)


def layers_of(numbers: Collection[int]) -> str:
    """Numbers of layers as a sentence names them.

    Example:
        >>> layers_of({5, 0, 1, 2})
        'layers 0-2, 5'
        >>> layers_of([3])
        'layer 3'
    """
    return f"layer{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
