"""Parsing safetensors headers of untrusted files."""

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
from .strict_json import FETCH_AGAIN, LFS_POINTER, json_words, parse_json_object, refuse_lfs_pointer, shown
from .tensor_table import TensorInfo, TensorTable, TensorType, table_of

LENGTH_BYTES = 8
"""A file starts with the length of its header: 64 bits, little-endian."""

HEADER_LIMIT = 100_000_000
"""Maximum size of a header, bytes; the limit of the safetensors library."""

TOTAL_HEADER_LIMIT = 256 << 20
"""Maximum size of all headers of a checkpoint, bytes; about ten times that of 200,000 tensors."""

TENSOR_LIMIT = 550_000
"""Maximum number of tensors in a checkpoint. The largest model has 495,328 in its experts (Kimi-K3); so many
are read and grouped within 10 seconds."""

EMPTY_LIMIT = 100_000
"""Maximum number of tensors without data, which the file size does not bound."""

TYPE_LIMIT = 10_000
"""Maximum number of different dtypes and shapes in a file; a model has dozens."""

RANK_LIMIT = 32
"""Maximum number of axes, which bounds the cost of multiplying sizes from a malicious header."""

NAME_LIMIT = 1024
"""Maximum length of a tensor name, characters."""


class Budget:
    """Limits on the headers of one checkpoint together; thread-safe, as files may be read concurrently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._tensors = self._empty = 0

    def spend(self, name: str, nbytes: int = 0, tensors: int = 0, empty: int = 0) -> None:
        """Adds the header of file `name` to the totals; CheckpointError when a limit is exceeded."""
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
    """The header's length in bytes, from the first eight or more bytes of file `name` and its size.

    Raises CheckpointError for an impossible length (zero, over `HEADER_LIMIT`, or past the end of the file)
    and for a Git LFS pointer.
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
        source: the file's first bytes, including its header, or a file opened for reading.
        size: size of the whole file in bytes.
        name: the file's name relative to the checkpoint, for `TensorInfo.file` and error messages.
        budget: limits shared by all files of a checkpoint; None for a single file.

    Raises:
        CheckpointError: the header is not valid for a file of that size, or exceeds the budget. As the
            format requires, the offsets must cover the data without gaps or overlaps.

    Example:
        >>> header = b'{"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}'
        >>> data = len(header).to_bytes(8, "little") + header + bytes(8)
        >>> info = read_header(data, len(data), "model.safetensors")["w"]
        >>> info.dtype, info.shape, info.nbytes
        ('BF16', (2, 2), 8)
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
"""An entry in the spelling of all common writers, with the comma after it."""

METADATA = "__metadata__"
"""The key of a header that is not a tensor."""


def _read_as_written(raw: bytes, name: str, base: int, size: int) -> TensorTable | None:
    """A fast `_read_any` for valid headers in the usual spelling; None for any other header.

    Each check is one pass over a whole column instead of a loop over tensors.
    """
    if b"\\u" in raw:
        return None
    try:
        body = _after_metadata(raw.decode("utf-8").rstrip(" "), name)
    except (ValueError, RecursionError, CheckpointError):
        return None
    pieces = _ENTRY.split(body)
    separators, names, spelled, starts, ends = (pieces[group::5] for group in range(5))
    # Empty pieces before, between and after the matches mean that the entries cover the whole text.
    if not names or set(separators) != {""}:
        return None
    if len(set(spelled)) > TYPE_LIMIT:
        raise CheckpointError(
            f"{name}: the tensors have {len(set(spelled))} different dtypes and shapes, "
            f"expected at most {TYPE_LIMIT}.",
            hint=FETCH_AGAIN,
        )
    types = _tensor_types(spelled)
    if types is None or len(max(names, key=len)) > NAME_LIMIT or not "".join(names).isprintable():
        return None
    table = TensorTable(
        names,
        [tensor_type for tensor_type, _ in types.values()],
        list(map({text: kind for kind, text in enumerate(types)}.__getitem__, spelled)),
        array("q", map(base.__add__, map(int, starts))),
        array("q", map(base.__add__, map(int, ends))),
        [name],
        [0],
    )
    sizes = [nbytes for _, nbytes in types.values()]
    spans = map(operator.sub, table.ends, table.starts)
    valid = (
        table.repeated is None
        and METADATA not in table
        and all(map(operator.eq, spans, map(sizes.__getitem__, table.kinds)))
        and _covers(table, base, size)
    )
    return table if valid else None


def _after_metadata(text: str, name: str) -> str:
    """The text of a header's entries, each followed by a comma; ValueError if the text is not a header."""
    position = 1
    start = f'{{"{METADATA}":'
    if text.startswith(start):
        metadata, position = json.JSONDecoder(object_pairs_hook=_no_repeats).raw_decode(text, len(start))
        _check_metadata(metadata, name)
        if text[position : position + 1] != ",":
            raise ValueError("no tensor follows")
        position += 1
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError("no object")
    return text[position:-1] + ","


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _tensor_types(spelled: list[str]) -> dict[str, tuple[TensorType, int]] | None:
    """Tensor type and size in bytes by the text of dtype and shape; None if any of them is invalid."""
    types = {}
    for text in dict.fromkeys(spelled):
        try:
            entry = json.loads("{" + text + "}")
            dtype, shape, _ = _fields({**entry, "data_offsets": [0, 0]}, "")
        except (ValueError, CheckpointError):
            return None
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if bits % 8:
            return None
        types[text] = TensorType(dtype, shape), bits // 8
    return types


def _covers(table: TensorTable, base: int, size: int) -> bool:
    """True when the rows cover the bytes from `base` to the end of the file without gaps or overlaps."""
    starts, ends = table.starts, table.ends
    if starts[1:] != ends[:-1]:
        order = sorted(range(len(starts)), key=lambda row: (starts[row], ends[row]))
        starts, ends = (array("q", map(column.__getitem__, order)) for column in (starts, ends))
    return starts[0] == base and ends[-1] == size and starts[1:] == ends[:-1]


def _read_any(raw: bytes, name: str, end: int, size: int) -> TensorTable:
    """The tensors of a header, checked one by one; CheckpointError if it is not valid."""
    document = parse_json_object(raw, f"{name}: the header")
    if _ODD_NUMBER.search(raw) is not None:
        _refuse_odd_numbers(raw, name)
    _check_metadata(document.pop(METADATA, None), name)
    tensors = {key: _tensor(key, entry, name, end, size) for key, entry in document.items()}
    _check_cover(tensors, end, size, name)
    return table_of(tensors.values())


_ODD_NUMBER = re.compile(rb"[:\[,\s](?:-|NaN|Infinity|\d+[.eE]|\d{19})")
"""What begins a number that is no size, unless it is inside a string."""


def _refuse_odd_numbers(raw: bytes, name: str) -> None:
    """CheckpointError for a number that other readers refuse, and Python's JSON takes or makes a size of."""

    def refuse(text: str) -> float:
        raise CheckpointError(
            f"{name}: the header has the number {shown(text)}, expected whole ones from 0 to 2^63 - 1.",
            hint=FETCH_AGAIN,
        )

    def whole(text: str) -> float:
        return refuse(text) if text.startswith("-") or len(text) > 19 else int(text)

    json.loads(raw, parse_int=whole, parse_float=refuse, parse_constant=refuse)


def _check_marks(raw: bytes, data: int, name: str) -> None:
    """CheckpointError when a header must have more tensors than allowed, judged before it is parsed.

    A tensor has one opening brace and two brackets, and at least one byte of data unless it is one of the
    few empty ones; two more braces belong to the header itself and its metadata.
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
    """True for an integer from 0 to 2^63 - 1, but not for a bool."""
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
            f"{where} must be an object with dtype, shape and data_offsets, got {json_words(entry)}.",
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
    if math.prod(filter(None, shape)) * DTYPE_BITS[dtype] >= 1 << 63:
        # Libraries multiply the sizes one by one, and overflow even beside a size of zero.
        raise CheckpointError(
            f"{where}: {dtype} {shape} has sizes whose product does not fit into 64 bits.", hint=FETCH_AGAIN
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        raise CheckpointError(
            f"{where}: data_offsets must be two byte offsets, got {shown(offsets)}.", hint=FETCH_AGAIN
        )
    return dtype, tuple(shape), (offsets[0], offsets[1])


def _check_cover(tensors: Mapping[str, TensorInfo], base: int, size: int, name: str) -> None:
    position, previous = base, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start < position:
            raise CheckpointError(
                f"{name}: tensors {previous} and {shown(info.name)} overlap.", hint=FETCH_AGAIN
            )
        if info.start > position:
            raise CheckpointError(
                f"{name}: bytes {position} to {info.start}, before tensor {shown(info.name)}, "
                "belong to no tensor.",
                hint=FETCH_AGAIN,
            )
        position, previous = info.end, shown(info.name)
    if position != size:
        raise CheckpointError(
            f"{name}: the file has {size} bytes, its last tensor, {previous}, ends at byte {position}.",
            hint="The file is damaged or was written twice; download it again.",
        )
