"""Safetensors files to be written: their headers, and where each tensor goes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..dtypes import DTYPE_BITS
from ..errors import CheckpointError
from .safetensors_header import METADATA
from .tensor_table import TensorInfo

_ORDER = {dtype: place for place, dtype in enumerate(DTYPE_BITS)}
"""The format's own order of dtypes, in which widths do not fall."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, safetensors dtype and shape of a tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; CheckpointError for a dtype that safetensors do not have."""
    if dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}.", hint="Choose one of them."
        )
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Tensors as the safetensors library orders them: widest elements first, then by name.

    Wide elements first keeps every tensor aligned to its element.
    """
    return sorted(specs, key=lambda spec: (-_ORDER[spec.dtype], spec.name))


def header_bytes(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The start of a file that holds these tensors in this order: length and header.

    The header is padded with spaces to a multiple of 8 bytes.
    """
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        ends = [offset, offset + spec.nbytes]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file before its first byte: the header, and where each tensor goes.

    `tensors` maps names to their places; offsets count from the start of the file.
    """

    name: str
    header: bytes
    tensors: Mapping[str, TensorInfo]

    @property
    def size(self) -> int:
        return max((t.end for t in self.tensors.values()), default=len(self.header))


def plan_file(name: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> FilePlan:
    """The `FilePlan` of a file with these tensors, widest elements first and then by name.

    Wide elements first keeps every tensor aligned to its element; the order is also the one that
    the safetensors library writes. The header is padded with spaces to a multiple of 8 bytes.
    """
    ordered = in_file_order(specs)
    header = header_bytes(ordered, metadata)
    places: dict[str, TensorInfo] = {}
    start = len(header)
    for spec in ordered:
        places[spec.name] = TensorInfo(spec.name, spec.dtype, spec.shape, name, start, start + spec.nbytes)
        start += spec.nbytes
    return FilePlan(name, header, places)
