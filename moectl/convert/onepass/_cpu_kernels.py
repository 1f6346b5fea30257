# mypy: ignore-errors
"""Kernels of the one-pass conversion on CPUs, compiled by numba; `cpu_pass` prepares and calls them.

Both run iterations `first` to `last` (exclusive) of the loop nest, the last loop fastest. `loops` has a row
per loop: size, step in input bytes, step in output words, then its step in every coordinate. `limits` are the
coordinates' bounds, the first `edges` of them the input's, the others the output's.
"""

from __future__ import annotations

import pickle
from contextlib import suppress

import numba
import numpy as np


class _TolerantCache:
    """Numba's cache on disk, where unreadable code is compiled again and failing writes are ignored."""

    def __init__(self, cache):
        self._cache = cache

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def load_overload(self, *signature):
        try:
            return self._cache.load_overload(*signature)
        except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError):
            with suppress(OSError):
                self._cache.flush()
            return None

    def save_overload(self, *overload):
        with suppress(OSError):  # a full disk
            self._cache.save_overload(*overload)


def _compiled(function):
    """`function` compiled, and cached on disk if a directory is writable."""
    try:
        compiled = numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    except RuntimeError:  # no directory for the cache
        return numba.njit(nogil=True, boundscheck=False)(function)
    if hasattr(compiled, "_cache"):  # absent with NUMBA_DISABLE_JIT
        compiled._cache = _TolerantCache(compiled._cache)
    return compiled


@_compiled
def _seek(iteration, loops, index, base):
    """Sets the loops to `iteration`: `index`, and in `base` input bytes, output words, coordinates."""
    base[:] = 0
    for i in range(loops.shape[0] - 1, -1, -1):
        index[i] = iteration % loops[i, 0]
        iteration //= loops[i, 0]
        for j in range(base.shape[0]):
            base[j] += index[i] * loops[i, j + 1]


@_compiled
def _advance(loops, index, base):
    """Sets the loops to the next iteration."""
    for i in range(loops.shape[0] - 1, -1, -1):
        index[i] += 1
        wraps = index[i] == loops[i, 0]
        back = index[i] - 1 if wraps else 0
        for j in range(base.shape[0]):
            base[j] += (0 if wraps else loops[i, j + 1]) - back * loops[i, j + 1]
        if not wraps:
            return
        index[i] = 0


@_compiled
def _all_inside(base, highest, limits):
    inside = True
    for i in range(limits.shape[0]):
        inside &= base[2 + i] + highest[i] < limits[i]
    return inside


@_compiled
def _any_outside(base, lowest, limits, start, end):
    """True when the whole tile is beyond one of the limits `start` to `end`."""
    outside = False
    for i in range(start, end):
        outside |= base[2 + i] + lowest[i] >= limits[i]
    return outside


@_compiled
def _fill(target, start, tile, words, tables, fills):
    """Writes a tile that lies entirely in the padding."""
    for kind in range(tables.shape[0]):
        value = tables[kind, 0, fills[kind, 0]]
        for slot in range(1, tables.shape[1]):
            value |= tables[kind, slot, fills[kind, slot]]
        for i in range(tile.shape[0]):
            target[start + tile[i, 1] + words[kind, 0]] = value


@_compiled
def gather(
    source,
    target,
    first,
    last,
    loops,
    tile,
    slots,
    words,
    tables,
    fills,
    limits,
    edges,
    lowest,
    highest,
):
    """Words of `target` from bytes of `source` through 256-entry tables, tile by tile.

    tile:   [words of a tile, 2 + limits] input bytes, output words, coordinates
    slots:  [kinds, slots, 1 + source limits] input bytes, coordinates
    words:  [kinds, 1 + output limits] output words, coordinates
    tables: [kinds, slots, 256] what a byte contributes;  fills: [kinds, slots]
    """
    base = loops[0, 1:].copy()
    count = tables.shape[1]
    steps = np.ascontiguousarray(tile[:, :2].T).view(np.uint64)  # unsigned: no check for negative indices
    index = loops[:, 0].copy()
    _seek(first, loops, index, base)
    for iteration in range(first, last):
        if iteration > first:
            _advance(loops, index, base)
        if not _all_inside(base, highest, limits):
            if _any_outside(base, lowest, limits, edges, limits.shape[0]):
                continue
            if edges == limits.shape[0] and _any_outside(base, lowest, limits, 0, edges):
                _fill(target, base[1], tile, words, tables, fills)
            else:
                _gather_checked(source, target, base, tile, slots, words, tables, fills, limits, edges)
            continue
        for kind in range(tables.shape[0]):
            to = np.uint64(base[1] + words[kind, 0])
            if count == 1:
                table = tables[kind, 0]
                at = np.uint64(base[0] + slots[kind, 0, 0])
                for i in range(tile.shape[0]):
                    target[to + steps[1, i]] = table[source[at + steps[0, i]]]
            elif count == 2:
                t0, t1 = tables[kind, 0], tables[kind, 1]
                a0, a1 = np.uint64(base[0] + slots[kind, 0, 0]), np.uint64(base[0] + slots[kind, 1, 0])
                for i in range(tile.shape[0]):
                    s = steps[0, i]
                    target[to + steps[1, i]] = t0[source[a0 + s]] | t1[source[a1 + s]]
            else:
                _gather_fours(source, target, base[0], to, kind, steps, slots, tables)


@_compiled
def _gather_fours(source, target, start, to, kind, steps, slots, tables):
    """Words of one kind with a multiple of four slots."""
    for j in range(0, tables.shape[1], 4):
        t0, t1, t2, t3 = tables[kind, j], tables[kind, j + 1], tables[kind, j + 2], tables[kind, j + 3]
        a0, a1 = np.uint64(start + slots[kind, j, 0]), np.uint64(start + slots[kind, j + 1, 0])
        a2, a3 = np.uint64(start + slots[kind, j + 2, 0]), np.uint64(start + slots[kind, j + 3, 0])
        if j == 0:
            for i in range(steps.shape[1]):
                s = steps[0, i]
                target[to + steps[1, i]] = (
                    t0[source[a0 + s]] | t1[source[a1 + s]] | t2[source[a2 + s]] | t3[source[a3 + s]]
                )
        else:
            for i in range(steps.shape[1]):
                s = steps[0, i]
                target[to + steps[1, i]] |= (
                    t0[source[a0 + s]] | t1[source[a1 + s]] | t2[source[a2 + s]] | t3[source[a3 + s]]
                )


@_compiled
def _gather_checked(source, target, base, tile, slots, words, tables, fills, limits, edges):
    """A tile at the edge of the input or of the output: every coordinate is checked."""
    for kind in range(tables.shape[0]):
        for i in range(tile.shape[0]):
            written = True
            for j in range(edges, limits.shape[0]):
                if base[2 + j] + tile[i, 2 + j] + words[kind, 1 + j - edges] >= limits[j]:
                    written = False
            if not written:
                continue
            value = tables[kind, 0, 0] & 0
            for slot in range(tables.shape[1]):
                byte = fills[kind, slot]
                exists = True
                for j in range(edges):
                    if base[2 + j] + tile[i, 2 + j] + slots[kind, slot, 1 + j] >= limits[j]:
                        exists = False
                if exists:
                    byte = source[base[0] + tile[i, 0] + slots[kind, slot, 0]]
                value |= tables[kind, slot, byte]
            target[base[1] + tile[i, 1] + words[kind, 0]] = value


@_compiled
def copy_runs(
    source,
    target,
    first,
    last,
    loops,
    tile,
    unit,
    read,
    written,
    steps,
    start,
    mask,
    fill,
    limits,
    edges,
    top,
):
    """Copies runs of `written` units of `unit` bytes, each byte XOR `mask`, tile by tile.

    Of a run, `read` units come from the input. Later ones, and those beyond a limit of the input, are `fill`;
    units beyond a limit of the output are not written.

    tile:  [runs of a tile, 2 + limits] input bytes, output bytes, coordinates
    steps: [limits] step of a unit in each coordinate, not negative
    start: [1 + limits] position of the first byte of a run;  top: [limits] of the last of a tile
    """
    base, index = loops[0, 1:].copy(), loops[:, 0].copy()
    _seek(first, loops, index, base)
    for iteration in range(first, last):
        if iteration > first:
            _advance(loops, index, base)
        inside = _all_inside(base, top, limits)
        for run in range(tile.shape[0]):
            copied, total = read, written
            if not inside:
                for i in range(limits.shape[0]):
                    room = limits[i] - base[2 + i] - tile[run, 2 + i] - start[1 + i]
                    if room > (written - 1) * steps[i]:
                        continue
                    room = max(room + steps[i] - 1, 0) // steps[i] if steps[i] > 0 else 0
                    if i < edges:
                        copied = min(copied, room)
                    else:
                        total = min(total, room)
            total *= unit
            copied = min(copied * unit, total)
            s, t = base[0] + tile[run, 0] + start[0], base[1] + tile[run, 1]
            bytes_in, bytes_out = source[s : s + copied], target[t : t + total]
            for i in range(copied):
                bytes_out[i] = bytes_in[i] ^ mask
            for i in range(copied, total):
                bytes_out[i] = fill
