"""Safetensors files written piece by piece: a header, then raw bytes at known offsets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..checkpoint.header import DTYPE_BITS
from ..checkpoint.model import TensorInfo
from ..errors import CheckpointError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""Safetensors dtype spellings and the torch dtypes with the same bytes."""


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
        raise CheckpointError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}.")
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


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
    ordered = sorted(specs, key=lambda spec: (-_ORDER[spec.dtype], spec.name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in ordered:
        ends = [offset, offset + spec.nbytes]
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places: dict[str, TensorInfo] = {}
    start = len(header)
    for spec in ordered:
        places[spec.name] = TensorInfo(spec.name, spec.dtype, spec.shape, name, start, start + spec.nbytes)
        start += spec.nbytes
    return FilePlan(name, header, places)
