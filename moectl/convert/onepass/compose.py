"""Chains of steps composed into one pass: symbolically, from shapes alone.

Every step has a row in `STEPS_AS_VIEWS`, which says what it does to a `BitView` forth and back. A step
without a row, and a shape on which a step is no index arithmetic (a code cut in two, a fill that is
no bit pattern), makes a chain run step by step instead, with the same result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...files.tensor_table import TensorType
from ..steps.rearrange import Axes, Pattern
from ..steps.transforms import (
    Add,
    Bits,
    DtypeView,
    Flip,
    PackedCodes,
    Pad,
    Rearrange,
    Step,
    Widen,
    Xor,
    itemsize,
)
from .bitview import Atom, BitView, NotComposable
from .word_program import CopyLoop, OutputWord, SourceByte, WordProgram

WIDTHS = (4, 8, 2, 1)
"""Bytes of a word, the preferred first."""

MOST_WORDS = 64
"""Words of a program beyond which tables outgrow the cache."""


@dataclass(frozen=True)
class AsView:
    """What a step does to a view: forth, and back to the form that it is given."""

    apply: Callable[[Any, BitView, TensorType], None]
    undo: Callable[[Any, BitView, TensorType], None]


def _rearrange(view: BitView, left: Axes, right: Axes, sizes: Mapping[str, int]) -> None:
    names = [name for axis in left for name in axis]
    view.rearrange(
        [[sizes[name] for name in axis] for axis in left],
        [[names.index(name) for name in axis] for axis in right],
    )


def _rearranged(step: Rearrange, view: BitView, before: TensorType) -> None:
    pattern = Pattern.parse(step.pattern)
    _rearrange(view, pattern.left, pattern.right, pattern.sizes(before.shape, step.sizes))


def _rearranged_back(step: Rearrange, view: BitView, before: TensorType) -> None:
    pattern = Pattern.parse(step.pattern)
    _rearrange(view, pattern.right, pattern.left, pattern.sizes(before.shape, step.sizes))


def _padded(step: Pad, view: BitView, before: TensorType) -> None:
    if step.fill and before.dtype != "U8":
        raise NotComposable
    view.pad(step.axis, step.to, [step.fill >> i & 1 if i < 8 else 0 for i in range(view.bits)])


def _cut(step: Pad, view: BitView, before: TensorType) -> None:
    view.cut(step.axis, before.shape[step.axis])


def _flipped(step: Flip, view: BitView, before: TensorType) -> None:
    view.flip(step.axis)


def _unpacked(bits: int, view: BitView) -> None:
    view.expand(8 // bits)
    view.widen(8 - bits)


def _packed(bits: int, view: BitView) -> None:
    view.keep_low(bits)
    view.contract(8 // bits)


def _codes(step: PackedCodes, view: BitView, before: TensorType) -> None:
    (_unpacked if step.unpack else _packed)(step.bits, view)


def _codes_back(step: PackedCodes, view: BitView, before: TensorType) -> None:
    (_packed if step.unpack else _unpacked)(step.bits, view)


def _inverted(step: Xor, view: BitView, before: TensorType) -> None:
    view.xor([step.mask >> i & 1 for i in range(8)])


def _added(step: Add, view: BitView, before: TensorType) -> None:
    view.add(step.amount)


def _added_back(step: Add, view: BitView, before: TensorType) -> None:
    view.add(-step.amount % 256)


def _ordered(step: Bits, view: BitView, before: TensorType) -> None:
    view.order(step.order)


def _ordered_back(step: Bits, view: BitView, before: TensorType) -> None:
    view.order([int(i) for i in np.argsort(step.order)])


def _sized(view: BitView, size: int) -> None:
    """Elements of `size` bytes in place of the view's."""
    if 8 * size < view.bits:
        view.expand(view.bits // (8 * size))
    else:
        view.contract(8 * size // view.bits)


def _viewed(step: DtypeView, view: BitView, before: TensorType) -> None:
    _sized(view, itemsize(step.target))


def _viewed_back(step: DtypeView, view: BitView, before: TensorType) -> None:
    _sized(view, itemsize(step.source))


def _widened(step: Widen, view: BitView, before: TensorType) -> None:
    if step.source != "BF16":
        raise NotComposable  # a half's exponent is another one in F32
    view.shift_up(16)


def _widened_back(step: Widen, view: BitView, before: TensorType) -> None:
    if step.source != "BF16":
        raise NotComposable
    view.order(range(16, 32))


STEPS_AS_VIEWS: Mapping[type[Step], AsView] = {
    Rearrange: AsView(_rearranged, _rearranged_back),
    Pad: AsView(_padded, _cut),
    Flip: AsView(_flipped, _flipped),
    PackedCodes: AsView(_codes, _codes_back),
    Xor: AsView(_inverted, _inverted),
    Add: AsView(_added, _added_back),
    Bits: AsView(_ordered, _ordered_back),
    DtypeView: AsView(_viewed, _viewed_back),
    Widen: AsView(_widened, _widened_back),
}
"""Every step; which of them computes more than a byte at a time can have no row."""


@lru_cache(maxsize=512)
def compose(steps: tuple[Step, ...], canonical: TensorType, *, back: bool = False) -> WordProgram | None:
    """One pass that does all `steps` on one expert of type `canonical` (its axis 0 is 1), or undoes them.

    None when the steps, on this shape, are not one pass.
    """
    types = [canonical]
    for step in steps:
        types.append(step.output_type(*types[-1]))
    if not all(type(step) in STEPS_AS_VIEWS for step in steps) or any(0 in shape for _, shape in types):
        return None
    start = types[-1 if back else 0]
    view = BitView(start.shape, itemsize(start.dtype))
    try:
        todo = list(zip(steps, types, strict=False))
        if back:
            todo.reverse()
        while todo and _keeps_order(todo[-1][0]):
            todo.pop()
        for step, before in todo:
            row = STEPS_AS_VIEWS[type(step)]
            (row.undo if back else row.apply)(step, view, before)
        ends = [math.prod(shape) * itemsize(dtype) for dtype, shape in (types[0], types[-1])]
        return program_of(view, *(reversed(ends) if back else ends))
    except NotComposable:
        return None


def _keeps_order(step: Step) -> bool:
    """True for a rearrangement that changes the shape alone: what is written last needs no such change."""
    if not isinstance(step, Rearrange):
        return False
    pattern = Pattern.parse(step.pattern)
    return [n for axis in pattern.left for n in axis] == [n for axis in pattern.right for n in axis]


def program_of(view: BitView, source_bytes: int, target_bytes: int) -> WordProgram:
    """The pass that fills a contiguous tensor as `view` says, in the words that cost least."""
    view.flatten()
    view.expand(view.bits // 8)
    found = []
    for width in WIDTHS:
        words = view.fork()
        try:
            words.contract(width)
            found.append(_in_words(words, width, source_bytes, target_bytes))
        except NotComposable:
            continue
    if not found:
        raise NotComposable
    return min(found, key=lambda program: program.lookups)


@dataclass(frozen=True)
class _Placed:
    """An atom, the bytes that one of its indices moves in the output, and its weight in a limit there."""

    atom: Atom
    target: int
    limit: int | None
    weight: int

    def at(self, limits: int) -> tuple[int, ...]:
        return tuple(self.weight if i == self.limit else 0 for i in range(limits))


def _placed(view: BitView, width: int) -> tuple[list[_Placed], tuple[int, ...]]:
    """Every atom's place in the output, the fastest first, and the limits of digits that end early."""
    placed: list[_Placed] = []
    limits: list[int] = []
    stride = width
    for digit in reversed(view.axes[0]):
        weight = 1
        for atom in reversed(digit.atoms):
            placed.append(_Placed(atom, stride * weight, None if digit.whole else len(limits), weight))
            weight *= atom.size
        if not digit.whole:
            limits.append(digit.size)
        stride *= digit.size
    return placed, tuple(limits)


def _in_words(view: BitView, width: int, source_bytes: int, target_bytes: int) -> WordProgram:
    view.fold()
    placed, limits = _placed(view, width)
    loops: list[CopyLoop] = []
    tables: list[_Placed] = []
    for place in placed:
        atom, finer = place.atom, _part_of_byte(place.atom)
        if finer > 1:
            slow, fast = view.split_atom(atom, finer)
            tables.append(_Placed(view.tabulate(fast), place.target, place.limit, place.weight))
            place = _Placed(slow, place.target * finer, place.limit, place.weight * finer)
            atom = slow
        if atom.table is not None:
            tables.append(place)
        elif atom.size > 1:
            loops.append(
                CopyLoop(atom.size, atom.step[0] // 8, place.target, atom.step[1:], place.at(len(limits)))
            )
    if math.prod(place.atom.size for place in tables) > MOST_WORDS:
        raise NotComposable
    words = tuple(_word(view, tables, index, len(limits)) for index in _indices(tables))
    return WordProgram(width, tuple(reversed(loops)), words, view.limits, limits, source_bytes, target_bytes)


def _part_of_byte(atom: Atom) -> int:
    """Fastest indices of an atom that must be told apart so that the rest moves by whole bytes."""
    if atom.table is not None or atom.step[0] % 8 == 0:
        return 1
    finer = 8 // math.gcd(8, atom.step[0])
    if atom.size % finer:
        return atom.size
    return finer


def _indices(tables: list[_Placed]) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*(range(place.atom.size) for place in tables))


def _word(view: BitView, tables: list[_Placed], index: tuple[int, ...], limits: int) -> OutputWord:
    """The word at one index of the tables; dimensions that no atom counts stay at 0."""
    chosen = {place.atom.table: i for place, i in zip(tables, index, strict=True)}
    entry = tuple(chosen.get(name, 0) for name in view.tables)
    where, known, invert, fill, added = (
        a[entry] for a in (view.where, view.known, view.invert, view.fill, view.added)
    )
    moves: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    fills: dict[tuple[int, ...], int] = {}
    for bit in np.flatnonzero(known).tolist():
        address, *at = where[bit].tolist()
        key = (int(added[bit]), address >> 3, *at)
        moves.setdefault(key, []).append((address & 7, bit))
        fills[key] = fills.get(key, 0) | int(fill[bit]) << (address & 7)
    return OutputWord(
        target=sum(place.target * i for place, i in zip(tables, index, strict=True)),
        at=tuple(
            sum(place.at(limits)[j] * i for place, i in zip(tables, index, strict=True))
            for j in range(limits)
        ),
        slots=tuple(
            SourceByte(key[1], key[2:], tuple(found), fills[key], key[0]) for key, found in moves.items()
        ),
        invert=sum(int(one) << bit for bit, one in enumerate(invert)),
    )
