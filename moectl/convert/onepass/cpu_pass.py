"""Runs word programs on CPU tensors: compiled loops of table lookups, on all threads.

Only tables of some kilobytes are allocated. A tile is a set of words that are adjacent in the output; loops
around tiles are ordered so that the finest input steps come last, which keeps the rows that a tile reads in
the L1 cache.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...lazy_torch import Tensor, np, torch
from .word_program import CopyLoop, OutputWord, SourceByte, WordProgram

TILE_WORDS = 128
"""Words of a tile: enough to amortize its overhead, few enough to stay in the cache."""

SHORTEST_RUN = 16
"""Bytes from which copying a run is faster than looking up its words."""

CHUNKS = 4
"""Pieces of work per thread."""

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclass(frozen=True, eq=False)
class Runs:
    """A program that copies runs of bytes: the `loops` around a run, and the kernel's other arguments."""

    loops: Array
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Tiles:
    """A program that looks up words in tiles: the `loops` around a tile, and the kernel's other arguments."""

    width: int
    loops: Array
    arguments: tuple[Any, ...]


def run(program: WordProgram, source: Tensor, target: Tensor) -> bool:
    """Fills contiguous `target` from contiguous `source`, both of the same number of experts. Always True."""
    from . import _cpu_kernels

    work = plan(program)
    experts = source.shape[0]
    loops = work.loops.copy()
    loops[0, 0] = experts
    iterations = int(np.prod(loops[:, 0]))
    source_bytes = source.reshape(-1).view(torch.uint8).numpy()
    target_words = target.view(-1).view(torch.uint8).numpy()
    if isinstance(work, Runs):
        kernel = _cpu_kernels.copy_runs
    else:
        kernel, target_words = _cpu_kernels.gather, target_words.view(_WORDS[work.width])
    threads = min(thread_count(), iterations)
    chunks = min(threads * CHUNKS, iterations) if threads > 1 else 1
    bounds = [iterations * i // chunks for i in range(chunks + 1)]
    calls = [
        (source_bytes, target_words, first, last, loops, *work.arguments) for first, last in pairwise(bounds)
    ]
    if threads == 1:
        kernel(*calls[0])
        return True
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(kernel, *call) for call in calls]:
            future.result()
    return True


def thread_count() -> int:
    """Threads that convert at once: torch's number, at most one per core."""
    return max(1, min(torch.get_num_threads(), os.cpu_count() or 1))


@lru_cache(maxsize=128)
def plan(program: WordProgram) -> Runs | Tiles:
    """`program` as arguments of a kernel; the number of experts is still open."""
    return _as_runs(program) or _as_tiles(program)


def _rows(loops: list[CopyLoop], unit: int) -> Array:
    """Loops as rows of integers, output steps in units of `unit` bytes."""
    return np.array(
        [(lp.size, lp.source, lp.target // unit, *lp.source_at, *lp.target_at) for lp in loops],
        dtype=np.int64,
    )


def _as_runs(program: WordProgram) -> Runs | None:
    """The program as copies of runs, if it has runs and they are long enough.

    A run is counted in words, or in bytes if its bytes differ in a coordinate of the input.
    """
    copied = _copied_bytes(program)
    if copied is None:
        return None
    mask, apart = copied
    (word,) = program.words
    loops, unit, units = list(program.for_experts(1)), program.width, 1
    step = (0,) * (len(apart) + len(word.at))
    if len(loops) > 1 and loops[-1].source == loops[-1].target == unit:
        last = loops.pop()
        step, units = (*last.source_at, *last.target_at), last.size
    if any(apart):
        if any(step[len(apart) :]) or (units > 1 and step[: len(apart)] != tuple(unit * by for by in apart)):
            return None
        step, unit, units = (*apart, *word.at), 1, units * unit
    if unit * units < SHORTEST_RUN or min(step, default=0) < 0:
        return None
    return _run_tiles(program, loops, (unit, units, step), mask)


def _run_tiles(
    program: WordProgram, loops: list[CopyLoop], run: tuple[int, int, tuple[int, ...]], mask: int
) -> Runs:
    """Tiles of runs, each run (bytes of a unit, units, step of a unit in each coordinate).

    A limit whose coordinate only the run itself changes shortens all runs equally.
    """
    unit, units, step = run
    (word,) = program.words
    slot, sources = word.slots[0], len(program.source_limits)
    outer, inner, extra = _tiled(loops)
    limits = np.array((*program.source_limits, *program.target_limits, *extra), dtype=np.int64)
    steps = np.array((*step, *(0 for _ in extra)), dtype=np.int64)
    start = np.array((slot.source, *slot.at, *word.at, *(0 for _ in extra)), dtype=np.int64)
    rows, tile = _rows(outer, 1), _offsets(inner, 1, 2 + len(limits))
    constant = ~(rows[:, 3:].any(0) | tile[:, 2:].any(0)) & (steps > 0)
    room = -(-(limits - start[1:]) // np.maximum(steps, 1))
    source_side = np.arange(len(limits)) < sources
    read, written = (
        int(max(0, min(units, room[constant & side].min(initial=units))))
        for side in (source_side, ~source_side)
    )
    moving = ~constant
    kept = np.concatenate(([True, True], moving))
    arguments = (
        *(np.ascontiguousarray(tile[:, kept]), unit, read, written, steps[moving], start[[True, *moving]]),
        *(np.uint8(mask), np.uint8(slot.fill ^ mask), limits[moving], int((moving & source_side).sum())),
        (tile[:, 2:].max(0) + start[1:] + (units - 1) * steps)[moving],
    )
    return Runs(np.ascontiguousarray(rows[:, [True, *kept]]), arguments)


def _copied_bytes(program: WordProgram) -> tuple[int, tuple[int, ...]] | None:
    """For a program whose words are consecutive input bytes: the mask that every byte is XORed with, and the
    step from a byte to the next in each coordinate of the input. None for other programs."""
    if len(program.words) != 1:
        return None
    (word,) = program.words
    masks = {word.invert >> 8 * i & 255 for i in range(program.width)}
    if word.target or len(word.slots) != program.width or len(masks) != 1:
        return None
    first, second = word.slots[0], word.slots[min(1, program.width - 1)]
    apart = tuple(b - a for a, b in zip(first.at, second.at, strict=True))
    for i, slot in enumerate(word.slots):
        moves = tuple((bit, 8 * i + bit) for bit in range(8))
        at = tuple(a + i * by for a, by in zip(first.at, apart, strict=True))
        if slot != SourceByte(first.source + i, at, moves, first.fill):
            return None
    return masks.pop(), apart


def _as_tiles(program: WordProgram) -> Tiles:
    loops, inner, extra = _tiled(list(program.for_experts(1)))
    loops = [loops[0], *sorted(loops[1:], key=lambda lp: -abs(lp.source))]
    sources, targets = len(program.source_limits), len(program.target_limits) + len(extra)
    tile = _offsets(inner, program.width, 2 + sources + targets)
    words = np.array(
        [(w.target // program.width, *w.at, *(0 for _ in extra)) for w in program.words], dtype=np.int64
    )
    slots, tables, fills = _tables(program)
    limits = np.array((*program.source_limits, *program.target_limits, *extra), dtype=np.int64)
    lowest, highest = (
        np.array(
            [
                int(pick(tile[:, 2 + j])) + int(pick(_offsets_in(slots, words, sources, j)))
                for j in range(len(limits))
            ]
        )
        for pick in (np.min, np.max)
    )
    arguments = (
        *(tile, slots, words, tables, fills, limits, sources),
        *(lowest.astype(np.int64), highest.astype(np.int64)),
    )
    return Tiles(program.width, _rows(loops, program.width), arguments)


def _offsets_in(slots: Array, words: Array, sources: int, limit: int) -> Array:
    """The offsets of the slots, or of the words, in coordinate `limit`."""
    return slots[:, :, 1 + limit] if limit < sources else words[:, 1 + limit - sources]


def _tiled(loops: list[CopyLoop]) -> tuple[list[CopyLoop], list[CopyLoop], list[int]]:
    """The loops around tiles, those of a tile, and one more limit if a tile does not divide its loop.

    A tile takes the loops with the finest output steps, the last of them in part.
    """
    outer, inner, extra = list(loops), list[CopyLoop](), list[int]()
    words = 1
    while words < TILE_WORDS and len(outer) > 1:
        loop = outer.pop()
        room = max(TILE_WORDS // words, 1)
        size, part = loop.size, _part(loop.size, room)
        if part < loop.size:
            slow = -(-loop.size // part)
            outer.append(_scaled(loop, slow, part))
            if slow * part > loop.size:
                extra.append(loop.size)
                outer, inner = (
                    [replace(lp, target_at=(*lp.target_at, 0)) for lp in nest] for nest in (outer, inner)
                )
                outer[-1] = replace(outer[-1], target_at=(*outer[-1].target_at[:-1], part))
                loop = replace(loop, target_at=(*loop.target_at, 1))
        inner.insert(0, replace(loop, size=part))
        words *= part
        if part < size:
            break
    return outer, inner, extra


def _part(size: int, room: int) -> int:
    """Iterations of `size` that a tile with `room` takes: all, a divisor, or `room`."""
    if size <= 2 * room:
        return size
    best = max(part for part in range(1, room + 1) if size % part == 0)
    return best if best * 4 >= room else room


def _scaled(loop: CopyLoop, size: int, by: int) -> CopyLoop:
    """`size` iterations, each as many as `by` of the loop's."""
    return CopyLoop(
        size,
        loop.source * by,
        loop.target * by,
        tuple(at * by for at in loop.source_at),
        tuple(at * by for at in loop.target_at),
    )


def _offsets(loops: list[CopyLoop], width: int, columns: int) -> Array:
    """Every iteration of `loops` as a row: input bytes, output words, coordinates."""
    offsets = np.zeros((1, columns), dtype=np.int64)
    for loop in loops:
        row = _rows([loop], width)[0, 1:]
        steps = np.arange(loop.size, dtype=np.int64)[:, None] * row
        offsets = (offsets[:, None] + steps[None]).reshape(-1, columns)
    return np.ascontiguousarray(offsets)


def _tables(program: WordProgram) -> tuple[Array, Array, Array]:
    """Slots' positions, tables and fills; every word is padded with empty slots to the same number."""
    most = max(1, *(len(word.slots) for word in program.words))
    most = most if most <= 2 else 4 * math.ceil(most / 4)
    kind = _WORDS[program.width]
    slots = np.zeros((len(program.words), most, 1 + len(program.source_limits)), dtype=np.int64)
    tables = np.zeros((len(program.words), most, 256), dtype=kind)
    fills = np.zeros((len(program.words), most), dtype=np.uint8)
    for i, word in enumerate(program.words):
        for j in range(most):
            slot = word.slots[min(j, len(word.slots) - 1)] if word.slots else None
            if slot is not None:
                slots[i, j] = (slot.source, *slot.at)
                fills[i, j] = slot.fill
            if j < max(len(word.slots), 1):
                tables[i, j] = _table(word, j, kind)
    return slots, tables, fills


def _table(word: OutputWord, which: int, kind: str) -> Array:
    """The bits of `word` for every value of byte `which`; the first also has the constant bits."""
    moves = word.slots[which].moves if word.slots else ()
    own_bits = sum(1 << to for _, to in moves)
    add = word.slots[which].add if word.slots else 0
    constant = word.invert & ~sum(1 << to for slot in word.slots for _, to in slot.moves) if which == 0 else 0
    table = []
    for byte in range(256):
        value = sum((byte + add >> bit & 1) << to for bit, to in moves)
        table.append(value ^ word.invert & own_bits | constant)
    return np.array(table, dtype=kind)
