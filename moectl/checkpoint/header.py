"""The safetensors header, checked before anything in it is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, BinaryIO

from ..errors import CheckpointError
from .model import TensorInfo
from .strict_json import parse_json_object, shown

LENGTH_BYTES = 8
"""A file starts with the header's length, 64 bits, little-endian."""

HEADER_LIMIT = 100_000_000
"""Longest header, bytes; the limit of the format's own reader."""

RANK_LIMIT = 32
"""Most axes of a tensor; keeps the product of sizes cheap whatever a header says."""

NAME_LIMIT = 1024
"""Longest tensor name, characters."""

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of every safetensors dtype."""

_TWICE = "Download the file again, or ask its publisher for a sound one."


def header_length(prefix: bytes, size: int, name: str) -> int:
    """Bytes of the header of file `name`, from its first eight bytes and its size.

    Raises CheckpointError when the length cannot be: zero, over `HEADER_LIMIT`, or past the file's end.
    """
    if size < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        got = min(size, len(prefix))
        raise CheckpointError(
            f"{name}: truncated file: a safetensors file starts with {LENGTH_BYTES} bytes of header length, "
            f"this one has {got} bytes.",
            hint=_TWICE,
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 2 <= length <= HEADER_LIMIT:
        raise CheckpointError(
            f"{name}: the header must have 2 to {HEADER_LIMIT} bytes, the file says {length}.",
            reason="It is not a safetensors file, or it is damaged.",
        )
    if LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{name}: truncated file: the header ends at byte {LENGTH_BYTES + length}, "
            f"the file has {size} bytes.",
            hint=_TWICE,
        )
    return length


def read_header(source: bytes | BinaryIO, size: int, name: str) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, by name, with absolute byte offsets in the file.

    Args:
        source: the file's first bytes, at least its header, or a file opened for reading.
        size: bytes of the whole file.
        name: the file's name relative to the checkpoint, for `TensorInfo.file` and messages.

    Raises:
        CheckpointError: anything in the header that cannot be true of a file of that size. Offsets
            must cover the data without gap or overlap, as the format demands.
    """
    if isinstance(source, bytes):
        length = header_length(source, size, name)
        raw = source[LENGTH_BYTES : LENGTH_BYTES + length]
    else:
        length = header_length(source.read(LENGTH_BYTES), size, name)
        raw = source.read(length)
    if len(raw) < length:
        raise CheckpointError(
            f"{name}: truncated file: the header has {length} bytes, only {len(raw)} could be read.",
            hint=_TWICE,
        )
    document = parse_json_object(raw, f"{name}: the header")
    _check_metadata(document.pop("__metadata__", None), name)
    base = LENGTH_BYTES + length
    tensors = {key: _tensor(key, entry, name, base, size) for key, entry in document.items()}
    _check_cover(tensors, base, size, name)
    return tensors


def _check_metadata(metadata: object, name: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{name}: the header's __metadata__ must map names to strings.")


def _whole(value: object) -> bool:
    """True for an integer of 0 to 2^63; JSON's true and false, which Python counts as such, are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor(key: str, entry: object, name: str, base: int, size: int) -> TensorInfo:
    where = f"{name}: tensor {shown(key)}"
    if not 0 < len(key) <= NAME_LIMIT:
        raise CheckpointError(f"{where}: a tensor's name must have 1 to {NAME_LIMIT} characters.")
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} must be an object with dtype, shape and data_offsets.")
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
            f"its offsets span {end - start} bytes."
        )
    return TensorInfo(key, dtype, shape, name, base + start, base + end)


def _fields(entry: dict[str, Any], where: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{where}: dtype {shown(dtype)} is unknown.", reason=f"Known are {', '.join(DTYPE_BITS)}."
        )
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(map(_whole, shape)):
        raise CheckpointError(f"{where}: shape must be a list of sizes, got {shown(shape)}.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        raise CheckpointError(f"{where}: data_offsets must be two byte offsets, got {shown(offsets)}.")
    return dtype, tuple(shape), (offsets[0], offsets[1])


def _check_cover(tensors: Mapping[str, TensorInfo], base: int, size: int, name: str) -> None:
    at, before = base, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start < at:
            raise CheckpointError(f"{name}: tensors {before} and {shown(info.name)} overlap.")
        if info.start > at:
            raise CheckpointError(
                f"{name}: bytes {at} to {info.start}, before tensor {shown(info.name)}, belong to no tensor."
            )
        at, before = info.end, shown(info.name)
    if at != size:
        raise CheckpointError(
            f"{name}: the file has {size} bytes, its last tensor, {before}, ends at byte {at}.",
            hint="The file is damaged or was written twice; download it again.",
        )
