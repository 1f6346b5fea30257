# mypy: ignore-errors
"""The kernel of the one-pass conversion on GPUs; `cuda_pass` prepares and launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _convert_kernel(
    source,  # units of the input
    target,  # words of the output
    LOOPS: tl.constexpr,  # (size, source units, target words, coordinates) outside the tile, fastest first
    READ: tl.constexpr,  # (elements per index, size, source units, coordinates) of the tile's axes
    WRITE: tl.constexpr,  # (elements per index, size, target words, coordinates) in output order
    SHAPE: tl.constexpr,  # sizes of the tile's axes in input order, eight with those of size 1
    ORDER: tl.constexpr,  # the axes in output order
    WORDS: tl.constexpr,  # (target words, inverted bits, first slot, last, coordinates)
    SLOTS: tl.constexpr,  # (source units, fill, added, first move, last, coordinates)
    MOVES: tl.constexpr,  # (shift, mask in the word)
    READ_LIMITS: tl.constexpr,
    WRITE_LIMITS: tl.constexpr,
    TILE: tl.constexpr,
    MOVED: tl.constexpr,  # False if both orders are the same
):
    """One tile: reads slots in input order, assembles words, and writes them in output order.

    READ and SLOTS have coordinates for READ_LIMITS, WRITE and WORDS for WRITE_LIMITS, LOOPS for the former,
    then the latter.
    """
    rest = tl.program_id(0).to(tl.int64)
    read_from = tl.zeros((), tl.int64)
    write_to = tl.zeros((), tl.int64)
    for i in tl.static_range(len(LOOPS)):
        index = rest % LOOPS[i][0]
        rest = rest // LOOPS[i][0]
        read_from += index * LOOPS[i][1]
        write_to += index * LOOPS[i][2]
    lane = tl.arange(0, TILE)
    near = tl.zeros((TILE,), tl.int32)
    for f in tl.static_range(len(READ)):
        near += lane // READ[f][0] % READ[f][1] * READ[f][2]
    far = tl.zeros((TILE,), tl.int32)
    for f in tl.static_range(len(WRITE)):
        far += lane // WRITE[f][0] % WRITE[f][1] * WRITE[f][2]

    for w in tl.static_range(len(WORDS)):
        word = tl.zeros((TILE,), target.dtype.element_ty)
        at = source + read_from + near
        word = _collected(word, at, lane, LOOPS, READ, SLOTS, MOVES, WORDS[w][2], WORDS[w][3], READ_LIMITS)
        if WORDS[w][1] != 0:
            word ^= tl.full((), WORDS[w][1], word.dtype)
        if MOVED:
            word = tl.reshape(word, SHAPE)
            word = tl.permute(
                word, ORDER[0], ORDER[1], ORDER[2], ORDER[3], ORDER[4], ORDER[5], ORDER[6], ORDER[7]
            )
            word = tl.reshape(word, (TILE,))
        to = target + (write_to + WORDS[w][0]) + far
        if len(WRITE_LIMITS) == 0:
            tl.store(to, word)
        else:
            written = lane >= 0
            for j in tl.static_range(len(WRITE_LIMITS)):
                written &= (
                    _coordinate(LOOPS, WRITE, lane, len(READ_LIMITS), j) + WORDS[w][4 + j] < WRITE_LIMITS[j]
                )
            tl.store(to, word, mask=written)


@triton.jit
def _collected(
    word,
    source,
    lane,
    LOOPS: tl.constexpr,
    READ: tl.constexpr,
    SLOTS: tl.constexpr,
    MOVES: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    LIMITS: tl.constexpr,
):
    """`word` with the bits of slots `FIRST` to `LAST` (exclusive)."""
    for s in tl.static_range(FIRST, LAST):
        if len(LIMITS) == 0:
            unit = tl.load(source + SLOTS[s][0])
        else:
            exists = lane >= 0
            for j in tl.static_range(len(LIMITS)):
                exists &= _coordinate(LOOPS, READ, lane, 0, j) + SLOTS[s][5 + j] < LIMITS[j]
            unit = tl.load(source + SLOTS[s][0], mask=exists, other=SLOTS[s][1])
        if SLOTS[s][2] != 0:
            unit = (unit + SLOTS[s][2]).to(source.dtype.element_ty)
        word = _moved(word, unit, MOVES, SLOTS[s][3], SLOTS[s][4])
    return word


@triton.jit
def _moved(word, unit, MOVES: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """`word` with the bits of `unit` that moves `FIRST` to `LAST` (exclusive) select."""
    for m in tl.static_range(FIRST, LAST):
        mask = tl.full((), MOVES[m][1], word.dtype)
        if MOVES[m][0] >= 0:
            word |= (unit.to(word.dtype) << MOVES[m][0]) & mask
        else:
            word |= (unit >> -MOVES[m][0]).to(word.dtype) & mask
    return word


@triton.jit
def _coordinate(LOOPS: tl.constexpr, FIELDS: tl.constexpr, lane, SKIP: tl.constexpr, J: tl.constexpr):
    """Coordinate `J` of every element of the tile."""
    rest = tl.program_id(0)
    base = tl.zeros((), tl.int32)
    for i in tl.static_range(len(LOOPS)):
        base += rest % LOOPS[i][0] * LOOPS[i][3 + SKIP + J]
        rest = rest // LOOPS[i][0]
    at = tl.zeros(lane.shape, tl.int32) + base
    for f in tl.static_range(len(FIELDS)):
        at += lane // FIELDS[f][0] % FIELDS[f][1] * FIELDS[f][3 + J]
    return at
