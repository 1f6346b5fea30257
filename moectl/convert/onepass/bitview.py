"""The source bit of every bit of a rearranged tensor, represented as index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...lazy_torch import np
from .word_program import Vector


class NotComposable(Exception):
    """The steps are not one pass of index arithmetic on this shape; they run one after another."""


@dataclass(frozen=True)
class Atom:
    """`size` indices that each move a bit's position by `step`, or that index table dimension `table`."""

    size: int
    step: Vector
    table: int | None = None


@dataclass(frozen=True)
class Digit:
    """`size` indices counted by `atoms`, the slowest first; less than their product if it ends early."""

    size: int
    atoms: tuple[Atom, ...]

    @property
    def whole(self) -> bool:
        """True when every index of the atoms occurs."""
        return self.size == math.prod(atom.size for atom in self.atoms)


Axis = list[Digit]


def size_of(axis: Sequence[Digit]) -> int:
    """Indices of an axis."""
    return math.prod(digit.size for digit in axis)


def merged(axis: Axis) -> Axis:
    """The axis with consecutive atoms merged where the slower continues the faster."""
    out: Axis = []
    for digit in axis:
        if digit.size == 1:
            continue
        if out and digit.whole and out[-1].whole and len(digit.atoms) == len(out[-1].atoms) == 1:
            (slow,), (fast,) = out[-1].atoms, digit.atoms
            if (
                slow.table is None
                and fast.table is None
                and slow.step == tuple(m * fast.size for m in fast.step)
            ):
                out[-1] = Digit(slow.size * fast.size, (replace(fast, size=slow.size * fast.size),))
                continue
        out.append(digit)
    return out


MAX_ENTRIES = 1 << 16
"""Largest number of bits in the tables of a view: far more than a program has words for."""

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


class BitView:
    """The bits of a tensor's elements as bit positions in a contiguous source of `shape`.

    Attributes:
        axes: the axes, one list of digits each.
        where: int64 ``[*tables, bits, 1 + limits]``: source position of each bit of the element at index 0,
            and its coordinates.
        from_source: ``[*tables, bits]``: True where the bit comes from the source, False for a constant.
        invert: ``[*tables, bits]``: 1 where the bit is inverted; of a constant, its value.
        fill: ``[*tables, bits]``: the bit, before `invert`, where a coordinate is beyond its limit.
        added: ``[*tables, bits]``: added to the source's byte, modulo 256, before the bit is taken.
        limits: size of each padded axis before it was padded.
    """

    def __init__(self, shape: Sequence[int], itemsize: int) -> None:
        self.axes: list[Axis] = []
        stride = 8 * itemsize
        for size in reversed(shape):
            self.axes.insert(0, [Digit(size, (Atom(size, (stride,)),))] if size > 1 else [])
            stride *= size
        self.where: Ints = np.arange(8 * itemsize, dtype=np.int64)[:, None]
        self.from_source = np.ones(8 * itemsize, dtype=bool)
        self.invert = np.zeros(8 * itemsize, dtype=np.uint8)
        self.fill = np.zeros(8 * itemsize, dtype=np.uint8)
        self.added = np.zeros(8 * itemsize, dtype=np.uint8)
        self.limits: Vector = ()
        self._tables: list[int] = []
        self._named = 0

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return self.from_source.shape[-1]

    # ---- axes

    def rearrange(self, split: Sequence[Sequence[int]], joined: Sequence[Sequence[int]]) -> None:
        """Splits the axes into `split` sizes, slowest first, and joins the pieces numbered in `joined`."""
        pieces: list[Axis] = []
        for axis, sizes in zip(self.axes, split, strict=True):
            rest, parts = axis, list[Axis]()
            for size in reversed(sizes):
                rest, taken = self._take(rest, size)
                parts.insert(0, taken)
            pieces += parts
        self.axes = [merged([digit for i in group for digit in pieces[i]]) for group in joined]

    def flatten(self) -> None:
        """Merges all axes into one."""
        self.axes = [merged([digit for axis in self.axes for digit in axis])]

    def flip(self, axis: int) -> None:
        """Exchanges the halves of `axis`."""
        rest, half = self._take(self.axes[axis], size_of(self.axes[axis]) // 2)
        if len(rest) != 1 or not rest[0].whole:
            raise NotComposable
        (atom,) = rest[0].atoms
        if atom.table is None:
            self.where = self.where + np.array(atom.step)
            atom = replace(atom, step=tuple(-move for move in atom.step))
        else:
            at = self._tables.index(atom.table)
            self._each(lambda a: np.flip(a, at))
        self.axes[axis] = merged([Digit(2, (atom,)), *half])

    def pad(self, axis: int, to: int, fill: Sequence[int]) -> None:
        """Pads `axis` to `to` indices, with elements whose bits are `fill`."""
        size = size_of(self.axes[axis])
        if size == to:
            return
        self._set_fill(np.array(fill, dtype=np.uint8) ^ self.invert)
        self.limits = (*self.limits, size)
        self.where = np.concatenate((self.where, np.zeros_like(self.where[..., :1])), -1)
        weight = 1
        for i, digits in enumerate(self.axes):
            grown: Axis = []
            weight = 1
            for digit in reversed(digits):
                if i == axis and not digit.whole:
                    raise NotComposable
                atoms: list[Atom] = []
                for atom in reversed(digit.atoms):
                    atoms.insert(0, self._weighed(atom, weight if i == axis else 0))
                    weight *= atom.size
                grown.insert(0, Digit(digit.size, tuple(atoms)))
            self.axes[i] = grown
        self._grow(axis, to, size)

    def _weighed(self, atom: Atom, weight: int) -> Atom:
        """`atom` with its weight in the coordinate added last."""
        if atom.table is None:
            return replace(atom, step=(*atom.step, weight))
        at = self._tables.index(atom.table)
        index = np.arange(atom.size).reshape([-1 if i == at else 1 for i in range(self.from_source.ndim)])
        self.where[..., -1] += index * weight
        return replace(atom, step=(*atom.step, 0))

    def _grow(self, axis: int, to: int, size: int) -> None:
        """Extends `axis` from `size` to `to` indices by its slowest atom."""
        digits = self.axes[axis]
        if not digits:
            step = (0,) * len(self.limits) + (1,)
            self.axes[axis] = [Digit(to, (Atom(to, step),))]
            return
        (slowest,), rest = digits[0].atoms, size // digits[0].size
        if slowest.table is not None:
            raise NotComposable
        grown = replace(slowest, size=-(-to // rest))
        if to % rest == 0:
            self.axes[axis] = [Digit(grown.size, (grown,)), *digits[1:]]
        else:
            self.axes[axis] = [Digit(to, (grown, *(a for digit in digits[1:] for a in digit.atoms)))]

    def _set_fill(self, fill: NDArray[np.uint8]) -> None:
        if (
            self.added.any()
            or fill[~self.from_source].any()
            or (self.limits and (fill != self.fill)[self.from_source].any())
        ):
            raise NotComposable
        self.fill = fill

    def cut(self, axis: int, to: int) -> None:
        """Ends `axis` after `to` indices."""
        digits = self.axes[axis]
        if size_of(digits) == to:
            return
        for count in range(1, len(digits) + 1):
            ending, rest = digits[:count], digits[count:]
            if to % size_of(rest) == 0:
                if count > 1 and not all(digit.whole for digit in ending):
                    raise NotComposable
                atoms = [atom for digit in ending for atom in digit.atoms]
                self.axes[axis] = merged([*self._digits(to // size_of(rest), atoms), *rest])
                return
        raise NotComposable

    def _digits(self, size: int, atoms: list[Atom]) -> Axis:
        """Digits for the first `size` indices of `atoms`: one per atom if they end with a whole atom."""
        while atoms:
            rest = math.prod(atom.size for atom in atoms[1:])
            if size % rest == 0:
                atoms[0] = self._shortened(atoms[0], size // rest)
                return [Digit(atom.size, (atom,)) for atom in atoms if atom.size > 1]
            if size > rest:
                break
            self._shortened(atoms.pop(0), 1)
        return [Digit(size, tuple(atoms))]

    def _shortened(self, atom: Atom, size: int) -> Atom:
        if atom.table is not None and size < atom.size:
            at = self._tables.index(atom.table)
            self._each(lambda a: a.take(range(size), axis=at))
        return replace(atom, size=size)

    def _take(self, digits: Axis, size: int) -> tuple[Axis, Axis]:
        """The digits without their fastest `size` indices, and the digits of those."""
        rest, taken = list(digits), list[Digit]()
        while size > 1:
            if not rest:
                raise NotComposable
            digit = rest.pop()
            if size % digit.size == 0:
                taken.insert(0, digit)
                size //= digit.size
            elif digit.size % size == 0:
                slow, fast = self._split_digit(digit, size)
                rest += slow
                taken = fast + taken
                size = 1
            else:
                raise NotComposable
        return rest, taken

    def _split_digit(self, digit: Digit, size: int) -> tuple[Axis, Axis]:
        atoms, fast, left = list(digit.atoms), list[Digit](), size
        while left > 1:
            atom = atoms.pop()
            if left % atom.size == 0:
                fast.insert(0, Digit(atom.size, (atom,)))
                left //= atom.size
            elif atom.size % left == 0:
                slow, quick = self.split_atom(atom, left)
                atoms.append(slow)
                fast.insert(0, Digit(left, (quick,)))
                left = 1
            else:
                raise NotComposable
        return self._digits(digit.size // size, atoms), fast

    def split_atom(self, atom: Atom, size: int) -> tuple[Atom, Atom]:
        """`atom` as a slow one and a fast one of `size` indices."""
        if atom.table is None:
            slow = Atom(atom.size // size, tuple(move * size for move in atom.step))
            return slow, replace(atom, size=size)
        at = self._tables.index(atom.table)
        self._each(lambda a: a.reshape(*a.shape[:at], -1, size, *a.shape[at + 1 :]))
        self._tables[at : at + 1] = names = [self._name(), self._name()]
        return replace(atom, size=atom.size // size, table=names[0]), replace(atom, size=size, table=names[1])

    # ---- elements

    def expand(self, parts: int) -> None:
        """Splits each element into `parts` elements along the last axis, lowest bits first."""
        if parts == 1:
            return
        self._each(
            lambda a: a.reshape(*a.shape[: len(self._tables)], parts, -1, *a.shape[len(self._tables) + 1 :])
        )
        name = self._name()
        self._tables.append(name)
        self.axes[-1] = merged([*self.axes[-1], Digit(parts, (self._folded(Atom(parts, self._zero, name)),))])

    def contract(self, parts: int) -> None:
        """Joins `parts` neighbours on the last axis into one element, the first in the lowest bits."""
        rest, taken = self._take(self.axes[-1], parts)
        if not all(digit.whole for digit in taken):
            raise NotComposable
        names = [self._tabled(atom).table for digit in taken for atom in digit.atoms]
        at = [self._tables.index(name) for name in names if name is not None]
        last = range(len(self._tables) - len(at), len(self._tables))
        self._each(lambda a: np.moveaxis(a, at, list(last)))
        self._tables = [name for name in self._tables if name not in names]
        kept = len(self._tables)
        self._each(lambda a: a.reshape(*a.shape[:kept], -1, *a.shape[kept + len(at) + 1 :]))
        self.axes[-1] = rest

    def widen(self, bits: int) -> None:
        """Adds `bits` zeros above the bits of each element."""
        self._extend(bits, after=True)

    def shift_up(self, bits: int) -> None:
        """Adds `bits` zeros below the bits of each element."""
        self._extend(bits, after=False)

    def _extend(self, bits: int, *, after: bool) -> None:
        def extended(a: NDArray[Any]) -> NDArray[Any]:
            zeros = np.zeros(
                (*a.shape[: len(self._tables)], bits, *a.shape[len(self._tables) + 1 :]), a.dtype
            )
            return np.concatenate((a, zeros) if after else (zeros, a), len(self._tables))

        self._each(extended)

    def order(self, order: Sequence[int]) -> None:
        """Permutes bits: bit i becomes what bit ``order[i]`` was. Bits that `order` omits are dropped."""
        self._each(lambda a: a.take(order, axis=len(self._tables)))

    def keep_low(self, bits: int) -> None:
        """Keeps the lowest `bits` bits; the others must be constant zeros."""
        if self.from_source[..., bits:].any() or self.invert[..., bits:].any():
            raise NotComposable
        self.order(range(bits))

    def xor(self, mask: Sequence[int]) -> None:
        """Inverts bits where `mask` is 1."""
        self.invert = self.invert ^ np.array(mask, dtype=np.uint8)

    def add(self, amount: int) -> None:
        """Adds `amount`, modulo 256, to elements, which must be whole bytes of the source."""
        steps = [atom.step[0] for axis in self.axes for digit in axis for atom in digit.atoms]
        order = self.where - self.where[..., :1, :]
        whole = self.bits == 8 and self.from_source.all() and not self.invert.any()
        in_place = not (order[..., 0] != np.arange(self.bits)).any() and not order[..., 1:].any()
        if not (whole and in_place) or any(step % 8 for step in steps) or (self.where[..., 0, 0] % 8).any():
            raise NotComposable
        self.added = self.added + np.uint8(amount)

    # ---- tables

    @property
    def tables(self) -> tuple[int, ...]:
        """Names of the leading dimensions of `where`."""
        return tuple(self._tables)

    def fold(self) -> None:
        """Replaces table dimensions with fixed steps where all entries agree on one."""
        for axis in self.axes:
            for i, digit in enumerate(axis):
                axis[i] = replace(digit, atoms=tuple(self._folded(atom) for atom in digit.atoms))

    def tabulate(self, atom: Atom) -> Atom:
        """`atom`, which is no longer in any axis, as a dimension of the tables."""
        return self._tabled(atom)

    @property
    def _zero(self) -> Vector:
        return (0,) * (1 + len(self.limits))

    def _name(self) -> int:
        self._named += 1
        return self._named

    def _each(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        for name in ("where", "from_source", "invert", "fill", "added"):
            setattr(self, name, change(getattr(self, name)))

    def _tabled(self, atom: Atom) -> Atom:
        if atom.table is not None:
            return atom
        if atom.size * self.from_source.size > MAX_ENTRIES:
            raise NotComposable
        self._each(lambda a: np.repeat(a[None], atom.size, 0))
        moves = np.arange(atom.size)[:, None] * np.array(atom.step)
        self.where = self.where + moves.reshape(atom.size, *(1,) * (self.where.ndim - 2), -1)
        self._tables.insert(0, self._name())
        return Atom(atom.size, self._zero, self._tables[0])

    def _folded(self, atom: Atom) -> Atom:
        """`atom` with a fixed step if all bits agree on one, otherwise unchanged."""
        if atom.table is None:
            return atom
        at = self._tables.index(atom.table)
        for a in (self.from_source, self.invert, self.fill, self.added):
            if (a != a.take([0], axis=at)).any():
                return atom
        moves = np.diff(self.where, axis=at)[self.from_source.take(range(1, atom.size), axis=at)]
        step = tuple(int(move) for move in moves[0]) if len(moves) else self._zero
        if (moves != np.array(step)).any():
            return atom
        self._each(lambda a: a.take(0, axis=at))
        self._tables.pop(at)
        return Atom(atom.size, step)
