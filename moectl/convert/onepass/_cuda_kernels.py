# mypy: ignore-errors
"""Body of the one-pass conversion on GPUs; `cuda_pass` prepares and launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _convert_kernel(
    source,  # units of the input
    target,  # words of the output
    LOOPS: tl.constexpr,  # (size, source units, target words, coordinates) of what is around, fastest first
    READ: tl.constexpr,  # (places below, size, source units, coordinates) of the tile's axes
    WRITE: tl.constexpr,  # (places below, size, target words, coordinates) in the order of the output
    SHAPE: tl.constexpr,  # the tile's axes in the order of the input, eight with those of size 1
    ORDER: tl.constexpr,  # their order in the output
    WORDS: tl.constexpr,  # (target words, inverted bits, first slot, last, coordinates) at each place
    SLOTS: tl.constexpr,  # (source units, fill, added, first move, last, coordinates)
    MOVES: tl.constexpr,  # (bits up or down, mask of the word)
    READ_LIMITS: tl.constexpr,
    WRITE_LIMITS: tl.constexpr,
    TILE: tl.constexpr,
    MOVED: tl.constexpr,  # False where both orders are the same
):
    """One tile: its slots read in the input's order, made into words, written in the output's order.

    READ and SLOTS have coordinates for READ_LIMITS, WRITE and WORDS for WRITE_LIMITS, LOOPS for both in turn.
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
            wanted = lane >= 0
            for j in tl.static_range(len(WRITE_LIMITS)):
                wanted &= (
                    _coordinate(LOOPS, WRITE, lane, len(READ_LIMITS), j) + WORDS[w][4 + j] < WRITE_LIMITS[j]
                )
            tl.store(to, word, mask=wanted)


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
    """`word` with the bits of slots `FIRST` to `LAST`."""
    for s in tl.static_range(FIRST, LAST):
        if len(LIMITS) == 0:
            unit = tl.load(source + SLOTS[s][0])
        else:
            there = lane >= 0
            for j in tl.static_range(len(LIMITS)):
                there &= _coordinate(LOOPS, READ, lane, 0, j) + SLOTS[s][5 + j] < LIMITS[j]
            unit = tl.load(source + SLOTS[s][0], mask=there, other=SLOTS[s][1])
        if SLOTS[s][2] != 0:
            unit = (unit + SLOTS[s][2]).to(source.dtype.element_ty)
        word = _moved(word, unit, MOVES, SLOTS[s][3], SLOTS[s][4])
    return word


@triton.jit
def _moved(word, unit, MOVES: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """`word` with the bits of `unit` that moves `FIRST` to `LAST` name."""
    for m in tl.static_range(FIRST, LAST):
        mask = tl.full((), MOVES[m][1], word.dtype)
        if MOVES[m][0] >= 0:
            word |= (unit.to(word.dtype) << MOVES[m][0]) & mask
        else:
            word |= (unit >> -MOVES[m][0]).to(word.dtype) & mask
    return word


@triton.jit
def _coordinate(LOOPS: tl.constexpr, FIELDS: tl.constexpr, lane, SKIP: tl.constexpr, J: tl.constexpr):
    """Coordinate `J` of every place of the tile."""
    rest = tl.program_id(0)
    base = tl.zeros((), tl.int32)
    for i in tl.static_range(len(LOOPS)):
        base += rest % LOOPS[i][0] * LOOPS[i][3 + SKIP + J]
        rest = rest // LOOPS[i][0]
    at = tl.zeros(lane.shape, tl.int32) + base
    for f in tl.static_range(len(FIELDS)):
        at += lane // FIELDS[f][0] % FIELDS[f][1] * FIELDS[f][3 + J]
    return at
