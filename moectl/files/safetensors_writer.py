"""Planning safetensors files: headers, and the offsets of their tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..dtypes import DTYPE_BITS
from ..errors import CheckpointError
from .safetensors_header import METADATA
from .tensor_table import TensorInfo

_ORDER = {dtype: index for index, dtype in enumerate(DTYPE_BITS)}
"""The order of dtypes in the safetensors library, by non-decreasing width."""


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
    """Bytes of a tensor; CheckpointError for a dtype that safetensors does not have."""
    if dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}.", hint="Choose one of them."
        )
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The tensors in the order of the safetensors library: widest elements first, then by name.

    This keeps every tensor aligned to its element size.
    """
    return sorted(specs, key=lambda spec: (-_ORDER[spec.dtype], spec.name))


def header_bytes(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with these tensors in this order: the header's length, and the header.

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
    """A safetensors file to be written: its header, and its tensors by name with their absolute offsets."""

    name: str
    header: bytes
    tensors: Mapping[str, TensorInfo]

    @property
    def size(self) -> int:
        return max((t.end for t in self.tensors.values()), default=len(self.header))


def plan_file(name: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> FilePlan:
    """The plan of a file with these tensors, in the order of `in_file_order`.

    Example:
        >>> plan = plan_file("out.safetensors", [TensorSpec("w", "BF16", (2, 2))], {})
        >>> plan.tensors["w"].nbytes, plan.size - len(plan.header)
        (8, 8)
    """
    ordered = in_file_order(specs)
    header = header_bytes(ordered, metadata)
    tensors: dict[str, TensorInfo] = {}
    start = len(header)
    for spec in ordered:
        tensors[spec.name] = TensorInfo(spec.name, spec.dtype, spec.shape, name, start, start + spec.nbytes)
        start += spec.nbytes
    return FilePlan(name, header, tensors)
