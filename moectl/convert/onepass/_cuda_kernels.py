# mypy: ignore-errors
"""Kernels of the one-pass conversion on GPUs; `cuda_pass` and `guard` launch them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _convert_kernel(
    source,  # units of the input
    target,  # words of the output
    refused,  # None, or an integer on the GPU: if it is not 0, nothing is written
    LOOPS: tl.constexpr,  # (size, source units, target words, coordinates) outside the tile, fastest first
    READ: tl.constexpr,  # (elements per index, size, source units, coordinates) of the tile's axes
    WRITE: tl.constexpr,  # (elements per index, size, target words, coordinates) in output order
    SHAPE: tl.constexpr,  # sizes of the tile's axes in input order, eight with those of size 1
    ORDER: tl.constexpr,  # the axes in output order
    WORDS: tl.constexpr,  # (target words, inverted bits, first group, last, coordinates)
    GROUPS: tl.constexpr,  # (first slot, last, first move, last): slots side by side, whose bits move
    SLOTS: tl.constexpr,  # (source units, fill, added, bit in the group, coordinates)
    MOVES: tl.constexpr,  # (shift, mask in the word)
    READ_LIMITS: tl.constexpr,
    WRITE_LIMITS: tl.constexpr,
    TILE: tl.constexpr,
    MOVED: tl.constexpr,  # False if both orders are the same
    PERMUTES: tl.constexpr,  # whether PTX's byte permutation is there
):
    """One tile: reads slots in input order, assembles words, and writes them in output order.

    READ and SLOTS have coordinates for READ_LIMITS, WRITE and WORDS for WRITE_LIMITS, LOOPS for the former,
    then the latter.
    """
    if refused is not None:  # noqa: SIM102 - Triton decides the outer one when it compiles
        if tl.load(refused) != 0:
            return
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
        word = _assembled(
            word, at, lane, LOOPS, READ, GROUPS, SLOTS, MOVES, WORDS[w][2], WORDS[w][3], READ_LIMITS, PERMUTES
        )
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
def _assembled(
    word,
    source,
    lane,
    LOOPS: tl.constexpr,
    READ: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    MOVES: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    LIMITS: tl.constexpr,
    PERMUTES: tl.constexpr,
):
    """`word` with the bits of groups `FIRST` to `LAST` (exclusive)."""
    for g in tl.static_range(FIRST, LAST):
        group = _collected(
            word, source, lane, LOOPS, READ, SLOTS, GROUPS[g][0], GROUPS[g][1], LIMITS, PERMUTES
        )
        word = _moved(word, group, MOVES, GROUPS[g][2], GROUPS[g][3])
    return word


@triton.jit
def _collected(
    word,
    source,
    lane,
    LOOPS: tl.constexpr,
    READ: tl.constexpr,
    SLOTS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    LIMITS: tl.constexpr,
    PERMUTES: tl.constexpr,
):
    """The units of slots `FIRST` to `LAST` (exclusive) side by side, in a word of the type of `word`.

    A single one stays as it is, since it may be wider.
    """
    if LAST - FIRST == 1:
        group = _loaded(source, lane, LOOPS, READ, SLOTS, FIRST, LIMITS)
    elif (
        PERMUTES
        and LAST - FIRST == 4
        and source.dtype.element_ty.primitive_bitwidth == 8
        and word.dtype.primitive_bitwidth == 32
    ):
        # As many instructions as words and half as many more: LLVM takes four times as many.
        group = tl.inline_asm_elementwise(
            """{
            .reg .b32 ab<2>, cd<2>;
            prmt.b32 ab0, $4, $5, 0x5140;
            prmt.b32 ab1, $4, $5, 0x7362;
            prmt.b32 cd0, $6, $7, 0x5140;
            prmt.b32 cd1, $6, $7, 0x7362;
            prmt.b32 $0, ab0, cd0, 0x5410;
            prmt.b32 $1, ab0, cd0, 0x7632;
            prmt.b32 $2, ab1, cd1, 0x5410;
            prmt.b32 $3, ab1, cd1, 0x7632;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [
                _loaded(source, lane, LOOPS, READ, SLOTS, FIRST, LIMITS),
                _loaded(source, lane, LOOPS, READ, SLOTS, FIRST + 1, LIMITS),
                _loaded(source, lane, LOOPS, READ, SLOTS, FIRST + 2, LIMITS),
                _loaded(source, lane, LOOPS, READ, SLOTS, FIRST + 3, LIMITS),
            ],
            dtype=word.dtype,
            is_pure=True,
            pack=4,
        )
    else:
        group = tl.zeros(word.shape, word.dtype)
        for s in tl.static_range(FIRST, LAST):
            unit = _loaded(source, lane, LOOPS, READ, SLOTS, s, LIMITS)
            group |= unit.to(word.dtype) << SLOTS[s][3]
    return group


@triton.jit
def _loaded(
    source,
    lane,
    LOOPS: tl.constexpr,
    READ: tl.constexpr,
    SLOTS: tl.constexpr,
    S: tl.constexpr,
    LIMITS: tl.constexpr,
):
    """The unit of slot `S`."""
    if len(LIMITS) == 0:
        unit = tl.load(source + SLOTS[S][0])
    else:
        exists = lane >= 0
        for j in tl.static_range(len(LIMITS)):
            exists &= _coordinate(LOOPS, READ, lane, 0, j) + SLOTS[S][4 + j] < LIMITS[j]
        unit = tl.load(source + SLOTS[S][0], mask=exists, other=SLOTS[S][1])
    if SLOTS[S][2] != 0:
        unit = (unit + SLOTS[S][2]).to(source.dtype.element_ty)
    return unit


@triton.jit
def _moved(word, group, MOVES: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """`word` with the bits of `group` that moves `FIRST` to `LAST` (exclusive) select."""
    for m in tl.static_range(FIRST, LAST):
        mask = tl.full((), MOVES[m][1], word.dtype)
        if MOVES[m][0] >= 0:
            word |= (group.to(word.dtype) << MOVES[m][0]) & mask
        else:
            word |= (group >> -MOVES[m][0]).to(word.dtype) & mask
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


@triton.jit(do_not_specialize=["count", "at", "least", "stop"])
def _examine_kernel(
    numbers,  # integers of 8 or 16 bits
    found,  # int32: see `guard.Guard`
    count,
    at,  # where in `found` the bounds of these numbers are
    least,
    stop,
    MASK: tl.constexpr,  # bits of a number that count
    MOST: tl.constexpr,  # beyond all numbers
    BLOCK: tl.constexpr,
):
    """Bounds of some numbers; refuses those above 0 and below `least`, or from `stop` on."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    if first + BLOCK <= count:  # without a mask, 16 bytes at a time
        x = tl.load(numbers + first + lane).to(tl.int32) & MASK
    else:
        x = tl.load(numbers + first + lane, mask=first + lane < count, other=0).to(tl.int32) & MASK
    high = tl.max(x, axis=0)
    below = tl.min((x - 1).to(tl.uint32, bitcast=True), axis=0)  # of 0 it is the largest
    low = tl.minimum(below, MOST - 1).to(tl.int32) + 1
    tl.atomic_max(found + at, MOST - low)
    tl.atomic_max(found + at + 1, high)
    if (high >= stop) | (low < least):
        tl.store(found, 1)
