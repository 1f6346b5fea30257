"""Safetensors files written piece by piece: a header, then raw bytes at known offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..checkpoint.model import TensorInfo
from ..checkpoint.writing import TensorSpec as TensorSpec
from ..checkpoint.writing import header_bytes, in_file_order
from ..checkpoint.writing import nbytes as nbytes

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
