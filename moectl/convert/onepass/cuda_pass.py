"""Runs word programs on CUDA tensors: one launch over tiles of all experts.

A tile has a power of two of each loop, chosen so that both reads and writes are coalesced; its words change
order between the two in registers and shared memory. A loop that no power of two divides well is masked
beyond its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import permutations
from math import gcd, prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .word_program import CopyLoop, OutputWord, SourceByte, WordProgram

TILE_WORDS = 2048
RANK = 8
"""Axes of a tile, which the kernel lists explicitly."""

CONTIGUOUS = 128
"""Contiguous bytes that a tile covers in the input and in the output if loops allow: one cache line."""

MAX_INDEX = 1 << 31
"""Offsets inside an expert, and tiles, are counted in 32 bits."""

WASTE = 1.15
"""By which factor tiles may exceed the size of a loop."""

_LAUNCHING = Lock()
"""Held while a launch is compiled or started, since Triton's caches are not made for several threads."""

UNITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True, eq=False)
class PassLaunch:
    """A launch without its tensors.

    Attributes:
        unit, width: bytes per load and per store.
        tiles: per expert.
        constants: the kernel's.
        compiled: the kernel's compiled forms that were launched, by what they depend on beside constants.
    """

    unit: int
    width: int
    tiles: int
    constants: dict[str, Any]
    compiled: dict[object, Any] = field(default_factory=dict)


def run(program: WordProgram, source: Tensor, target: Tensor, refused: Tensor | None = None) -> bool:
    """Fills contiguous `target` from `source`; False, `target` untouched, if addresses do not allow it.

    Nothing is written if `refused`, an int32 on the GPU, is not 0 when the kernel starts.
    """
    start = starter(program, source, target)
    if start is None:
        return False
    with torch.cuda.device(source.device) if source.is_cuda else nullcontext():
        start(source, target, refused)
    return True


Start = Callable[[Tensor, Tensor, Tensor | None], None]


def starter(program: WordProgram, source: Tensor, target: Tensor) -> Start | None:
    """`run` for tensors like these, at addresses with the same remainders of 16; None if it would be False.

    They have to be on the current device.
    """
    launch = plan(program, gcd(source.data_ptr(), program.source_bytes, 8))
    tiles = launch.tiles * source.shape[0]
    if (
        target.data_ptr() % launch.width
        or max(program.source_bytes, program.target_bytes, tiles) >= MAX_INDEX
    ):
        return None
    return partial(_start, launch, tiles)


def _start(launch: PassLaunch, tiles: int, source: Tensor, target: Tensor, refused: Tensor | None) -> None:
    key = source.device, source.data_ptr() % 16, target.data_ptr() % 16, refused is None
    form = launch.compiled.get(key)
    if form is not None:
        start_form(form, tiles, source, target, refused, *launch.constants)
        return
    from ._cuda_kernels import _convert_kernel

    units = source.reshape(-1).view(UNITS[launch.unit])
    words = target.view(-1).view(UNITS[launch.width])
    constants = launch.constants | {"PERMUTES": source.is_cuda and torch.version.hip is None}
    launch.compiled[key] = first_start(_convert_kernel, tiles, units, words, refused, **constants)


def first_start(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> Any:
    """Launches a Triton `kernel`; returns its compiled form, or None from the interpreter, which has none."""
    with _LAUNCHING:
        return kernel[(programs,)](*arguments, **constants)


def start_form(form: Any, programs: int, *arguments: Any) -> None:
    """Launches a compiled form, with anything in the place of constants.

    Triton's own search for the form hashes all constants, which takes longer than the launch.
    """
    form[programs, 1, 1](*arguments)


@lru_cache(maxsize=256)
def plan(program: WordProgram, alignment: int) -> PassLaunch:
    """The launch of `program` on an input whose experts start at multiples of `alignment` bytes."""
    unit, words = _in_units(program, alignment)
    program = _coarsened(program, words)
    words = program.words
    loops, fields, ends = _tiled(program, unit)
    read = (*program.source_limits, *ends)
    write = (*program.target_limits, *ends)
    by_source = sorted(fields, key=lambda field: -abs(field.source))
    by_target = sorted(fields, key=lambda field: -field.target)
    constants = {
        "LOOPS": tuple(
            (lp.size, lp.source // unit, lp.target // program.width, *lp.source_at, *lp.target_at)
            for lp in (*reversed(loops), _experts(program, len(read), len(write)))
        ),
        "READ": _fields(by_source, lambda lp: (lp.source // unit, *lp.source_at)),
        "WRITE": _fields(by_target, lambda lp: (lp.target // program.width, *lp.target_at)),
        "SHAPE": (*(1 for _ in range(RANK - len(fields))), *(field.size for field in by_source)),
        "ORDER": (
            *range(RANK - len(fields)),
            *(RANK - len(fields) + by_source.index(field) for field in by_target),
        ),
        **_word_tables(words, unit, program.width, (0,) * len(ends)),
        "READ_LIMITS": read,
        "WRITE_LIMITS": write,
        "TILE": prod(field.size for field in fields),
        "MOVED": by_source != by_target,
        "PERMUTES": False,
    }
    return PassLaunch(unit, program.width, prod(lp.size for lp in loops), constants)


def _fields(
    fields: list[CopyLoop], steps: Callable[[CopyLoop], tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Fields, the slowest first, each with the number of elements per index."""
    return tuple(
        (prod(lower.size for lower in fields[i + 1 :]), field.size, *steps(field))
        for i, field in enumerate(fields)
    )


def _experts(program: WordProgram, read: int, write: int) -> CopyLoop:
    """The outermost loop over experts; its size only has to exceed their number."""
    return CopyLoop(1 << 30, program.source_bytes, program.target_bytes, (0,) * read, (0,) * write)


def _word_tables(
    words: tuple[OutputWord, ...], unit: int, width: int, more: tuple[int, ...]
) -> dict[str, Any]:
    """Words, groups of slots, slots and moves as the kernel reads them.

    Bits of a group that move by the same distance share a move.
    """
    rows: list[tuple[int, ...]] = []
    groups: list[tuple[int, ...]] = []
    slots: list[tuple[int, ...]] = []
    moves: list[tuple[int, int]] = []
    fitting = max(1, width // unit)
    for word in words:
        first_group = len(groups)
        for first in range(0, len(word.slots), fitting):
            together = word.slots[first : first + fitting]
            order = _cheapest_order(together, 8 * unit, 8 * width)
            masks = _masks(together, order)
            ends = (len(slots), len(slots) + len(together), len(moves), len(moves) + len(masks))
            groups.append(ends)
            moves += masks.items()
            slots += (
                (slot.source // unit, slot.fill, slot.add, at, *slot.at, *more)
                for at, slot in sorted(zip(order, together, strict=True), key=lambda item: item[0])
            )
        rows.append((word.target // width, word.invert, first_group, len(groups), *word.at, *more))
    return {"WORDS": tuple(rows), "GROUPS": tuple(groups), "SLOTS": tuple(slots), "MOVES": tuple(moves)}


def _masks(slots: Sequence[SourceByte], order: Sequence[int]) -> dict[int, int]:
    """Bits of the word by the distance that they move, for slots that begin at bits `order` of a group."""
    masks: dict[int, int] = {}
    for slot, at in zip(slots, order, strict=True):
        for bit, to in slot.moves:
            masks[to - bit - at] = masks.get(to - bit - at, 0) | 1 << to
    return masks


def _cheapest_order(slots: Sequence[SourceByte], unit: int, width: int) -> tuple[int, ...]:
    """The bit of a group of `width` bits at which each slot of `unit` bits is best put: for the fewest moves.

    The best of all orders of up to four slots; of more, each slot in turn where it adds the fewest.
    """
    places = range(0, max(unit, width), unit)
    if len(places) <= 4:
        return min(permutations(places, len(slots)), key=lambda order: len(_masks(slots, order)))
    order: tuple[int, ...] = ()
    for done in range(1, len(slots) + 1):
        free = [(*order, place) for place in places if place not in order]
        order = min(free, key=lambda some: len(_masks(slots[:done], some)))
    return order


def _in_units(program: WordProgram, alignment: int) -> tuple[int, tuple[OutputWord, ...]]:
    """The load width in bytes that needs the fewest slots, and the words with slots of that width."""
    choices = []
    for unit in (1, 2, 4):
        if alignment % unit == 0 and all(loop.source % unit == 0 for loop in program.loops):
            slots = [_joined(program, word, unit) for word in program.words]
            words = [
                replace(word, slots=joined)
                for word, joined in zip(program.words, slots, strict=True)
                if joined is not None
            ]
            if len(words) == len(slots):
                choices.append((unit, tuple(words)))
    return min(choices, key=lambda item: sum(len(word.slots) for word in item[1]))


def _joined(program: WordProgram, word: OutputWord, unit: int) -> tuple[SourceByte, ...] | None:
    """The slots of `word` with the bytes of each `unit` joined; None if only some of its bytes may exist.

    Codes that share a byte may be on two sides of a limit: units of one byte are joined only if all
    coordinates are equal, so that this never fails for them.
    """
    groups: dict[tuple[object, ...], list[SourceByte]] = {}
    for slot in word.slots:
        groups.setdefault((slot.source // unit, slot.add, slot.at if unit == 1 else ()), []).append(slot)
    joined = []
    for slots in groups.values():
        index, add = slots[0].source // unit, slots[0].add
        first = min(slots, key=lambda slot: slot.source)
        if (add and unit > 1) or not all(_same_side(program, first, slot, unit) for slot in slots):
            return None
        moves = tuple((8 * (s.source % unit) + bit, to) for s in slots for bit, to in s.moves)
        fill = sum(slot.fill << 8 * (slot.source % unit) for slot in slots)
        joined.append(SourceByte(index * unit, first.at, moves, fill, add))
    return tuple(joined)


def _coarsened(program: WordProgram, words: tuple[OutputWord, ...]) -> WordProgram:
    """The program with `words`, and each input coordinate divided by the GCD of its steps.

    The compiler then sees that neighbours are on the same side of a limit, and vectorizes their loads.
    """
    divisors = [
        gcd(*(lp.source_at[i] for lp in program.loops), *(s.at[i] for word in words for s in word.slots)) or 1
        for i in range(len(program.source_limits))
    ]

    def divided(at: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(coordinate // by for coordinate, by in zip(at, divisors, strict=True))

    return replace(
        program,
        loops=tuple(replace(loop, source_at=divided(loop.source_at)) for loop in program.loops),
        words=tuple(replace(w, slots=tuple(replace(s, at=divided(s.at)) for s in w.slots)) for w in words),
        source_limits=tuple(
            -(-limit // by) for limit, by in zip(program.source_limits, divisors, strict=True)
        ),
    )


def _same_side(program: WordProgram, first: SourceByte, other: SourceByte, unit: int) -> bool:
    """True when two bytes of a unit are on the same side of every limit in every iteration."""
    apart = other.source - first.source
    for i, limit in enumerate(program.source_limits):
        if first.at[i] == other.at[i]:
            continue
        steps = (limit, first.at[i] - first.source % unit, *(loop.source_at[i] for loop in program.loops))
        if other.at[i] - first.at[i] != apart or any(step % unit for step in steps):
            return False
    return True


def _tiled(program: WordProgram, unit: int) -> tuple[list[CopyLoop], list[CopyLoop], tuple[int, ...]]:
    """The loops around tiles, those of a tile, and the sizes of loops that tiles exceed."""
    loops = list(program.loops)
    parts = [1] * len(loops)
    targets = [
        *((i, CONTIGUOUS // loops[i].target) for i in _finest(loops, lambda lp: lp.target)),
        *(
            (i, CONTIGUOUS // max(abs(loops[i].source), unit))
            for i in _finest(loops, lambda lp: abs(lp.source))
        ),
        *((i, TILE_WORDS) for i in _finest(loops, lambda lp: lp.target)),
    ]
    for i, target in targets:
        if parts[i] == 1 and sum(part > 1 for part in parts) == RANK:
            continue
        room = TILE_WORDS // (prod(parts) // parts[i])
        parts[i] = max(parts[i], _part(loops[i].size, min(target, room)))
    over = [i for i, part in enumerate(parts) if loops[i].size % part]
    ends = tuple(loops[i].size for i in over)
    outer, inner = [], []
    for i, (loop, part) in enumerate(zip(loops, parts, strict=True)):
        own = tuple(int(i == j) for j in over)
        fast = replace(loop, size=part, source_at=(*loop.source_at, *own), target_at=(*loop.target_at, *own))
        slow = CopyLoop(
            -(-loop.size // part),
            fast.source * part,
            fast.target * part,
            tuple(at * part for at in fast.source_at),
            tuple(at * part for at in fast.target_at),
        )
        outer += [slow] if slow.size > 1 else []
        inner += [fast] if part > 1 else []
    return outer, inner, ends


def _finest(loops: list[CopyLoop], step: Callable[[CopyLoop], int]) -> list[int]:
    return sorted(range(len(loops)), key=lambda i: step(loops[i]))


def _part(size: int, target: int) -> int:
    """The largest power of two up to `target` whose multiples exceed `size` by no more than `WASTE`."""
    part = 1 << max(target, 1).bit_length() - 1
    while -(-size // part) * part > WASTE * size:
        part //= 2
    return part
