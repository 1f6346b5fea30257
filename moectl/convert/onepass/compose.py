"""Composition of a chain's steps into one pass: symbolically, from shapes alone.

Every step has a row in `STEPS_AS_VIEWS` with its effect on a `BitView` and the inverse. A chain runs step
by step instead, with the same result, if a step has no row, or is not index arithmetic on a given shape
(it splits a code, or its fill is not a bit pattern).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...files.tensor_table import TensorType
from ...lazy_torch import np
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
"""Bytes of a word, in order of preference."""

MAX_WORDS = 64
"""Largest number of words of a program: beyond it, tables outgrow the cache."""


ViewChange = Callable[[Any, BitView, TensorType], None]
"""Changes a view as a step does, or its inverse; the `TensorType` is that of the step's input."""


def _rearrange_axes(view: BitView, left: Axes, right: Axes, sizes: Mapping[str, int]) -> None:
    names = [name for axis in left for name in axis]
    view.rearrange(
        [[sizes[name] for name in axis] for axis in left],
        [[names.index(name) for name in axis] for axis in right],
    )


def _rearrange(step: Rearrange, view: BitView, before: TensorType) -> None:
    pattern = Pattern.parse(step.pattern)
    _rearrange_axes(view, pattern.left, pattern.right, pattern.sizes(before.shape, step.sizes))


def _undo_rearrange(step: Rearrange, view: BitView, before: TensorType) -> None:
    pattern = Pattern.parse(step.pattern)
    _rearrange_axes(view, pattern.right, pattern.left, pattern.sizes(before.shape, step.sizes))


def _pad(step: Pad, view: BitView, before: TensorType) -> None:
    if step.fill and before.dtype != "U8":
        raise NotComposable
    view.pad(step.axis, step.to, [step.fill >> i & 1 if i < 8 else 0 for i in range(view.bits)])


def _undo_pad(step: Pad, view: BitView, before: TensorType) -> None:
    view.cut(step.axis, before.shape[step.axis])


def _flip(step: Flip, view: BitView, before: TensorType) -> None:
    view.flip(step.axis)


def _unpack(bits: int, view: BitView) -> None:
    view.expand(8 // bits)
    view.widen(8 - bits)


def _pack(bits: int, view: BitView) -> None:
    view.keep_low(bits)
    view.contract(8 // bits)


def _change_packing(step: PackedCodes, view: BitView, before: TensorType) -> None:
    (_unpack if step.unpack else _pack)(step.bits, view)


def _undo_change_packing(step: PackedCodes, view: BitView, before: TensorType) -> None:
    (_pack if step.unpack else _unpack)(step.bits, view)


def _xor(step: Xor, view: BitView, before: TensorType) -> None:
    view.xor([step.mask >> i & 1 for i in range(8)])


def _add(step: Add, view: BitView, before: TensorType) -> None:
    view.add(step.amount)


def _undo_add(step: Add, view: BitView, before: TensorType) -> None:
    view.add(-step.amount % 256)


def _permute_bits(step: Bits, view: BitView, before: TensorType) -> None:
    view.order(step.order)


def _undo_permute_bits(step: Bits, view: BitView, before: TensorType) -> None:
    view.order([int(i) for i in np.argsort(step.order)])


def _resize_elements(view: BitView, size: int) -> None:
    """Regroups the view's bits into elements of `size` bytes."""
    if 8 * size < view.bits:
        view.expand(view.bits // (8 * size))
    else:
        view.contract(8 * size // view.bits)


def _view_dtype(step: DtypeView, view: BitView, before: TensorType) -> None:
    _resize_elements(view, itemsize(step.target))


def _undo_view_dtype(step: DtypeView, view: BitView, before: TensorType) -> None:
    _resize_elements(view, itemsize(step.source))


def _widen(step: Widen, view: BitView, before: TensorType) -> None:
    if step.source != "BF16":
        raise NotComposable  # fp16 and fp32 have different exponents
    view.shift_up(16)


def _undo_widen(step: Widen, view: BitView, before: TensorType) -> None:
    if step.source != "BF16":
        raise NotComposable
    view.order(range(16, 32))


STEPS_AS_VIEWS: Mapping[type[Step], tuple[ViewChange, ViewChange]] = {
    Rearrange: (_rearrange, _undo_rearrange),
    Pad: (_pad, _undo_pad),
    Flip: (_flip, _flip),
    PackedCodes: (_change_packing, _undo_change_packing),
    Xor: (_xor, _xor),
    Add: (_add, _undo_add),
    Bits: (_permute_bits, _undo_permute_bits),
    DtypeView: (_view_dtype, _undo_view_dtype),
    Widen: (_widen, _undo_widen),
}
"""Every step with its effect on a view and the inverse; steps that compute across bytes cannot be rows."""


@lru_cache(maxsize=512)
def compose(steps: tuple[Step, ...], canonical: TensorType, *, inverse: bool = False) -> WordProgram | None:
    """One pass that applies all `steps` to one expert of type `canonical` (its axis 0 is 1), or undoes them.

    None when the steps do not compose into one pass on this shape.
    """
    types = [canonical]
    for step in steps:
        types.append(step.output_type(*types[-1]))
    if not all(type(step) in STEPS_AS_VIEWS for step in steps) or any(0 in shape for _, shape in types):
        return None
    start = types[-1 if inverse else 0]
    view = BitView(start.shape, itemsize(start.dtype))
    try:
        changes = list(zip(steps, types, strict=False))
        if inverse:
            changes.reverse()
        while changes and _keeps_order(changes[-1][0]):
            changes.pop()
        for step, before in changes:
            apply, undo = STEPS_AS_VIEWS[type(step)]
            (undo if inverse else apply)(step, view, before)
        sizes = [math.prod(shape) * itemsize(dtype) for dtype, shape in (types[0], types[-1])]
        return program_of(view, *(reversed(sizes) if inverse else sizes))
    except NotComposable:
        return None


def _keeps_order(step: Step) -> bool:
    """True for a rearrangement that changes only the shape, which the output bytes do not depend on."""
    if not isinstance(step, Rearrange):
        return False
    pattern = Pattern.parse(step.pattern)
    return [n for axis in pattern.left for n in axis] == [n for axis in pattern.right for n in axis]


def program_of(view: BitView, source_bytes: int, target_bytes: int) -> WordProgram:
    """The pass that fills a contiguous tensor from the source of `view`, in the cheapest word width."""
    view.flatten()
    view.expand(view.bits // 8)
    programs = []
    for width in WIDTHS:
        words = copy.deepcopy(view)
        try:
            words.contract(width)
            programs.append(_in_words(words, width, source_bytes, target_bytes))
        except NotComposable:
            continue
    if not programs:
        raise NotComposable
    return min(programs, key=lambda program: program.lookups)


@dataclass(frozen=True)
class _PlacedAtom:
    """An atom, its step in the output in bytes, and its weight in the coordinate of an output limit."""

    atom: Atom
    target: int
    limit: int | None
    weight: int

    def at(self, limits: int) -> tuple[int, ...]:
        return tuple(self.weight if i == self.limit else 0 for i in range(limits))


def _placed(view: BitView, width: int) -> tuple[list[_PlacedAtom], tuple[int, ...]]:
    """Every atom with its output step, the fastest first, and the limits of digits that end early."""
    placed: list[_PlacedAtom] = []
    limits: list[int] = []
    stride = width
    for digit in reversed(view.axes[0]):
        weight = 1
        for atom in reversed(digit.atoms):
            placed.append(_PlacedAtom(atom, stride * weight, None if digit.whole else len(limits), weight))
            weight *= atom.size
        if not digit.whole:
            limits.append(digit.size)
        stride *= digit.size
    return placed, tuple(limits)


def _in_words(view: BitView, width: int, source_bytes: int, target_bytes: int) -> WordProgram:
    view.fold()
    placed, limits = _placed(view, width)
    loops: list[CopyLoop] = []
    tables: list[_PlacedAtom] = []
    for entry in placed:
        atom, within = entry.atom, _indices_within_byte(entry.atom)
        if within > 1:
            slow, fast = view.split_atom(atom, within)
            tables.append(_PlacedAtom(view.tabulate(fast), entry.target, entry.limit, entry.weight))
            entry = _PlacedAtom(slow, entry.target * within, entry.limit, entry.weight * within)
            atom = slow
        if atom.table is not None:
            tables.append(entry)
        elif atom.size > 1:
            loops.append(
                CopyLoop(atom.size, atom.step[0] // 8, entry.target, atom.step[1:], entry.at(len(limits)))
            )
    if math.prod(entry.atom.size for entry in tables) > MAX_WORDS:
        raise NotComposable
    words = tuple(_word(view, tables, index, len(limits)) for index in _indices(tables))
    return WordProgram(width, tuple(reversed(loops)), words, view.limits, limits, source_bytes, target_bytes)


def _indices_within_byte(atom: Atom) -> int:
    """Fastest indices of an atom to be split off so that the others step by whole bytes."""
    if atom.table is not None or atom.step[0] % 8 == 0:
        return 1
    within = 8 // math.gcd(8, atom.step[0])
    return atom.size if atom.size % within else within


def _indices(tables: list[_PlacedAtom]) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*(range(entry.atom.size) for entry in tables))


def _word(view: BitView, tables: list[_PlacedAtom], index: tuple[int, ...], limits: int) -> OutputWord:
    """The word at one index of the tables; dimensions without an atom stay at 0."""
    index_of = {entry.atom.table: i for entry, i in zip(tables, index, strict=True)}
    position = tuple(index_of.get(name, 0) for name in view.tables)
    where, from_source, invert, fill, added = (
        a[position] for a in (view.where, view.from_source, view.invert, view.fill, view.added)
    )
    moves: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    fills: dict[tuple[int, ...], int] = {}
    for bit in np.flatnonzero(from_source).tolist():
        address, *at = where[bit].tolist()
        key = (int(added[bit]), address >> 3, *at)
        moves.setdefault(key, []).append((address & 7, bit))
        fills[key] = fills.get(key, 0) | int(fill[bit]) << (address & 7)
    return OutputWord(
        target=sum(entry.target * i for entry, i in zip(tables, index, strict=True)),
        at=tuple(
            sum(entry.at(limits)[j] * i for entry, i in zip(tables, index, strict=True))
            for j in range(limits)
        ),
        slots=tuple(
            SourceByte(key[1], key[2:], tuple(bits), fills[key], key[0]) for key, bits in moves.items()
        ),
        invert=sum(int(flag) << bit for bit, flag in enumerate(invert)),
    )
