"""The safetensors header, checked before anything in it is believed."""

from __future__ import annotations

import json
import math
import operator
import re
import threading
from array import array
from collections.abc import Mapping
from typing import Any, BinaryIO

from ..dtypes import DTYPE_BITS
from ..errors import CheckpointError
from .strict_json import FETCH_AGAIN, LFS_POINTER, parse_json_object, refuse_lfs_pointer, shown
from .tensor_table import TensorInfo, TensorTable, TensorType, table_of

LENGTH_BYTES = 8
"""A file starts with the header's length, 64 bits, little-endian."""

HEADER_LIMIT = 100_000_000
"""Longest header, bytes; the limit of the format's own reader."""

TOTAL_HEADER_LIMIT = 256 << 20
"""Most bytes of all headers of a checkpoint, some ten times those of a model with 200 000 tensors."""

TENSOR_LIMIT = 2_000_000
"""Most tensors of a checkpoint, likewise."""

EMPTY_LIMIT = 100_000
"""Most tensors without data: they cost memory, and nothing bounds their number but this."""

RANK_LIMIT = 32
"""Most axes of a tensor; keeps the product of sizes cheap whatever a header says."""

NAME_LIMIT = 1024
"""Longest tensor name, characters."""


class Budget:
    """What the headers of one checkpoint may cost together; its files are read in any order or at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._tensors = self._empty = 0

    def spend(self, name: str, nbytes: int = 0, tensors: int = 0, empty: int = 0) -> None:
        """Counts what file `name` adds; CheckpointError when that makes more than any model has."""
        with self._lock:
            self._bytes += nbytes
            self._tensors += tensors
            self._empty += empty
            counted = (
                (self._bytes, TOTAL_HEADER_LIMIT, "bytes of headers"),
                (self._tensors, TENSOR_LIMIT, "tensors"),
                (self._empty, EMPTY_LIMIT, "tensors without data"),
            )
        for got, limit, what in counted:
            if got > limit:
                raise CheckpointError(
                    f"{name}: the checkpoint has {got} {what} up to this file, expected at most {limit}.",
                    hint="Use a checkpoint that keeps its tensors together, or ask for a higher limit.",
                )


def header_length(prefix: bytes, size: int, name: str) -> int:
    """Bytes of the header of file `name`, from its first bytes, eight or more, and its size.

    Raises CheckpointError when the length cannot be: zero, over `HEADER_LIMIT`, or past the file's end;
    or when the bytes are those of a Git LFS pointer.
    """
    refuse_lfs_pointer(prefix, name)
    if size < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        got = min(size, len(prefix))
        raise CheckpointError(
            f"{name}: truncated file: a safetensors file starts with {LENGTH_BYTES} bytes of header length, "
            f"this one has {got} bytes.",
            hint=FETCH_AGAIN,
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 2 <= length <= HEADER_LIMIT:
        raise CheckpointError(
            f"{name}: the header must have 2 to {HEADER_LIMIT} bytes, the file says {length}.",
            reason="It is not a safetensors file, or it is damaged.",
            hint=FETCH_AGAIN,
        )
    if LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{name}: truncated file: the header ends at byte {LENGTH_BYTES + length}, "
            f"the file has {size} bytes.",
            hint=FETCH_AGAIN,
        )
    return length


def read_header(source: bytes | BinaryIO, size: int, name: str, budget: Budget | None = None) -> TensorTable:
    """The tensors of a safetensors file, by name, with absolute byte offsets in the file.

    Args:
        source: the file's first bytes, at least its header, or a file opened for reading.
        size: bytes of the whole file.
        name: the file's name relative to the checkpoint, for `TensorInfo.file` and messages.
        budget: shared by all files of a checkpoint; None for a file alone.

    Raises:
        CheckpointError: anything in the header that cannot be true of a file of that size, or more
            than the budget allows. Offsets must cover the data without gap or overlap, as the format
            demands.
    """
    budget = budget or Budget()
    start = source[: len(LFS_POINTER)] if isinstance(source, bytes) else source.read(len(LFS_POINTER))
    length = header_length(start, size, name)
    budget.spend(name, nbytes=length)
    end = LENGTH_BYTES + length
    whole = source if isinstance(source, bytes) else start + source.read(max(0, end - len(start)))
    raw = whole[LENGTH_BYTES:end]
    if len(raw) < length:
        raise CheckpointError(
            f"{name}: truncated file: the header has {length} bytes, only {len(raw)} could be read.",
            hint=FETCH_AGAIN,
        )
    _check_marks(raw, size - end, name)
    tensors = _read_as_written(raw, name, end, size) or _read_any(raw, name, end, size)
    budget.spend(name, tensors=len(tensors), empty=tensors.empty)
    return tensors


_ENTRY = re.compile(
    r'"([^"\\]+)":\{("dtype":"[^"\\]+","shape":\[[\d,]*\]),"data_offsets":\[(0|[1-9]\d{0,17}),(0|[1-9]\d{0,17})\]\},',
    re.ASCII,
)
"""A tensor as every writer spells it, and the comma after it."""

METADATA = "__metadata__"
"""The entry of a header that is no tensor."""


def _read_as_written(raw: bytes, name: str, base: int, size: int) -> TensorTable | None:
    """What `_read_any` returns for a sound header that is spelled the usual way; None for any other.

    Tensors are not looked at one by one: each check is one pass over a whole column.
    """
    if b"\\u" in raw:
        return None
    try:
        body = _after_metadata(raw.decode("utf-8").rstrip(" "), name)
    except (ValueError, RecursionError, CheckpointError):
        return None
    pieces = _ENTRY.split(body)
    between, names, spelled, starts, ends = (pieces[group::5] for group in range(5))
    # The entries follow each other when nothing stands between them, before them or after them.
    if not names or set(between) != {""}:
        return None
    forms = _forms(spelled)
    if forms is None or len(max(names, key=len)) > NAME_LIMIT or not "".join(names).isprintable():
        return None
    table = TensorTable(
        names,
        [form for form, _ in forms.values()],
        list(map({text: kind for kind, text in enumerate(forms)}.__getitem__, spelled)),
        array("q", map(base.__add__, map(int, starts))),
        array("q", map(base.__add__, map(int, ends))),
        [name],
        [0],
    )
    sizes = [nbytes for _, nbytes in forms.values()]
    spans = map(operator.sub, table.ends, table.starts)
    sound = (
        table.repeated is None
        and METADATA not in table
        and all(map(operator.eq, spans, map(sizes.__getitem__, table.kinds)))
        and _covers(table, base, size)
    )
    return table if sound else None


def _after_metadata(text: str, name: str) -> str:
    """The entries of a header's text, each with a comma after it; an error for a text that is none."""
    at = 1
    start = f'{{"{METADATA}":'
    if text.startswith(start):
        metadata, at = json.JSONDecoder(object_pairs_hook=_no_repeats).raw_decode(text, len(start))
        _check_metadata(metadata, name)
        if text[at : at + 1] != ",":
            raise ValueError("no tensor follows")
        at += 1
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError("no object")
    return text[at:-1] + ","


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _forms(spelled: list[str]) -> dict[str, tuple[TensorType, int]] | None:
    """Dtype and shape, and the bytes of such a tensor, by their text; None when one of them is wrong."""
    found = {}
    for text in dict.fromkeys(spelled):
        try:
            entry = json.loads("{" + text + "}")
            dtype, shape, _ = _fields({**entry, "data_offsets": [0, 0]}, "")
        except (ValueError, CheckpointError):
            return None
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if bits % 8:
            return None
        found[text] = TensorType(dtype, shape), bits // 8
    return found


def _covers(table: TensorTable, base: int, size: int) -> bool:
    """True when the rows' bytes follow each other from `base` to the file's end."""
    starts, ends = table.starts, table.ends
    if starts[1:] != ends[:-1]:
        order = sorted(range(len(starts)), key=lambda row: (starts[row], ends[row]))
        starts, ends = (array("q", map(column.__getitem__, order)) for column in (starts, ends))
    return starts[0] == base and ends[-1] == size and starts[1:] == ends[:-1]


def _read_any(raw: bytes, name: str, end: int, size: int) -> TensorTable:
    """The tensors of a header, looked at one by one; CheckpointError for what cannot be true."""
    document = parse_json_object(raw, f"{name}: the header")
    _check_metadata(document.pop(METADATA, None), name)
    tensors = {key: _tensor(key, entry, name, end, size) for key, entry in document.items()}
    _check_cover(tensors, end, size, name)
    return table_of(tensors.values())


def _check_marks(raw: bytes, data: int, name: str) -> None:
    """CheckpointError when a header must have more tensors than are allowed; costs no parsing.

    A tensor has one opening brace and two brackets, and at least one byte of data unless it is one of
    the few empty ones; two more braces are the header's own and its metadata's.
    """
    objects, most = raw.count(b"{"), min(TENSOR_LIMIT, data + EMPTY_LIMIT)
    if max(objects - 2, raw.count(b"[") // 2) > most:
        raise CheckpointError(
            f"{name}: the header opens {objects} objects and {raw.count(b'[')} lists, "
            f"expected at most {most} tensors for {data} bytes of data.",
            hint=FETCH_AGAIN,
        )


def _check_metadata(metadata: object, name: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{name}: the header's __metadata__ must map names to strings.", hint=FETCH_AGAIN
        )


def _whole(value: object) -> bool:
    """True for an integer of 0 to 2^63; JSON's true and false, which Python counts as such, are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor(key: str, entry: object, name: str, base: int, size: int) -> TensorInfo:
    where = f"{name}: tensor {shown(key)}"
    if not 0 < len(key) <= NAME_LIMIT or not key.isprintable():
        raise CheckpointError(
            f"{where}: a tensor's name must have 1 to {NAME_LIMIT} characters, all of them printable.",
            hint=FETCH_AGAIN,
        )
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"{where} must be an object with dtype, shape and data_offsets, got {type(entry).__name__}.",
            hint=FETCH_AGAIN,
        )
    dtype, shape, offsets = _fields(entry, where)
    start, end = offsets
    if start > end or base + end > size:
        raise CheckpointError(
            f"{where}: offsets {start} to {end} do not lie inside the file's {size - base} bytes of data.",
            hint="The file is truncated or damaged; download it again.",
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - start):
        raise CheckpointError(
            f"{where}: {dtype} {list(shape)} takes {bits // 8} bytes and {bits % 8} bits, "
            f"its offsets span {end - start} bytes.",
            hint=FETCH_AGAIN,
        )
    return TensorInfo(key, dtype, shape, name, base + start, base + end)


def _fields(entry: dict[str, Any], where: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{where}: dtype {shown(dtype)} is unknown.",
            reason=f"Known are {', '.join(DTYPE_BITS)}.",
            hint="Store the tensor as one of them.",
        )
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(map(_whole, shape)):
        raise CheckpointError(
            f"{where}: shape must be a list of sizes, got {shown(shape)}.", hint=FETCH_AGAIN
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        raise CheckpointError(
            f"{where}: data_offsets must be two byte offsets, got {shown(offsets)}.", hint=FETCH_AGAIN
        )
    return dtype, tuple(shape), (offsets[0], offsets[1])


def _check_cover(tensors: Mapping[str, TensorInfo], base: int, size: int, name: str) -> None:
    at, before = base, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start < at:
            raise CheckpointError(
                f"{name}: tensors {before} and {shown(info.name)} overlap.", hint=FETCH_AGAIN
            )
        if info.start > at:
            raise CheckpointError(
                f"{name}: bytes {at} to {info.start}, before tensor {shown(info.name)}, belong to no tensor.",
                hint=FETCH_AGAIN,
            )
        at, before = info.end, shown(info.name)
    if at != size:
        raise CheckpointError(
            f"{name}: the file has {size} bytes, its last tensor, {before}, ends at byte {at}.",
            hint="The file is damaged or was written twice; download it again.",
        )
