"""The reversible steps that weight layouts are composed of.

A step is a frozen record without tensors. Axis 0 is the expert, and no step moves anything between
experts, so experts may be converted in batches of any size. Dtypes are spelled as in safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ... import dtypes
from ...errors import CheckpointError
from ...files.records import from_json, to_json
from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor, torch
from ...torch_dtypes import TorchDtypes
from .rearrange import Pattern

DTYPES: Mapping[str, torch.dtype] = TorchDtypes(
    {name: dtypes.DTYPES[name].torch for name in ("U8", "I8", "I16", "I32", "BF16", "F16", "F32")}
)
"""Storage dtypes of canonical and converted tensors, by their safetensors spelling."""

Shape = tuple[int, ...]

MAX_AXIS = 1 << 31
"""Largest axis that a step may produce: above any layer, and small enough to refuse an absurd manifest."""

_BLOCK_WORDS = 1 << 16
"""32-bit words whose bits are reordered at a time on a CPU, so that they stay in the cache."""


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors spelling of a storage dtype; CheckpointError for one that no step supports."""
    for name, supported in DTYPES.items():
        if supported is dtype:
            return name
    raise CheckpointError(f"tensors of {dtype} cannot be converted; known are {', '.join(DTYPES)}.")


def type_of(t: Tensor) -> TensorType:
    """Safetensors dtype and shape of `t`; CheckpointError for a dtype that no step supports."""
    return TensorType(dtype_name(t.dtype), tuple(t.shape))


def itemsize(dtype: str) -> int:
    """Bytes of one element of a storage dtype."""
    if dtype not in DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}.")
    return dtypes.DTYPES[dtype].bits // 8


@runtime_checkable
class Step(Protocol):
    """One reversible change of a tensor whose axis 0 is the expert."""

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        """The result's type for an input of `shape` and `dtype`; CheckpointError if it does not fit."""

    def apply(self, t: Tensor) -> Tensor:
        """The changed tensor."""

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        """The inverse of `apply`: the input of `shape` and `dtype` that became `t`."""


def _need(holds: bool, step: object, why: str) -> None:
    if not holds:
        raise CheckpointError(f"{step}: {why}.")


def _swap_last(shape: Shape, last: int) -> Shape:
    return (*shape[:-1], last)


@dataclass(frozen=True)
class Pad:
    """`axis` padded at its end with `fill` to `to` elements; undone by slicing."""

    axis: int
    to: int
    fill: int = 0

    def __post_init__(self) -> None:
        _need(1 <= self.axis <= 8 and 1 <= self.to <= MAX_AXIS, self, "axis or size out of range")
        _need(0 <= self.fill <= 255, self, "the fill must be 0 to 255")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        _need(self.axis < len(shape) and shape[self.axis] <= self.to, self, f"cannot pad {shape}")
        return TensorType(dtype, (*shape[: self.axis], self.to, *shape[self.axis + 1 :]))

    def apply(self, t: Tensor) -> Tensor:
        size = t.shape[self.axis]
        if size == self.to:
            return t
        out = t.new_empty(self.output_type("", tuple(t.shape)).shape)
        out.narrow(self.axis, 0, size).copy_(t)
        out.narrow(self.axis, size, self.to - size).fill_(self.fill)
        return out

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        return t.narrow(self.axis, 0, shape[self.axis])


@dataclass(frozen=True)
class Flip:
    """The two halves of `axis` exchanged."""

    axis: int

    def __post_init__(self) -> None:
        _need(1 <= self.axis <= 8, self, "axis out of range")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        _need(self.axis < len(shape) and shape[self.axis] % 2 == 0, self, f"no halves in {shape}")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor) -> Tensor:
        first, second = t.chunk(2, self.axis)
        return torch.cat((second, first), self.axis)

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        return self.apply(t)


@dataclass(frozen=True)
class Rearrange:
    """A named-axis rearrangement that leaves the first axis in place.

    `sizes` fixes all names but at most one per axis of the pattern's left side.
    """

    pattern: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parsed = self._parsed()
        first = parsed.left[0]
        _need(len(first) == 1 and parsed.right[0] == first, self, "the expert axis must stay first and whole")
        names = {name for axis in parsed.left[1:] for name in axis}
        _need(set(self.sizes) <= names, self, "sizes of names that the pattern does not have")
        _need(all(1 <= size <= MAX_AXIS for size in self.sizes.values()), self, "sizes out of range")

    def _parsed(self) -> Pattern:
        return Pattern.parse(self.pattern)

    def __hash__(self) -> int:
        return hash((self.pattern, tuple(sorted(self.sizes.items()))))

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        parsed = self._parsed()
        return TensorType(dtype, parsed.shape(parsed.sizes(shape, self.sizes)))

    def apply(self, t: Tensor) -> Tensor:
        parsed = self._parsed()
        return parsed.apply(t, parsed.sizes(tuple(t.shape), self.sizes))

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        parsed = self._parsed()
        return parsed.reverse.apply(t, parsed.sizes(shape, self.sizes))


@dataclass(frozen=True)
class PackedCodes:
    """Codes of `bits` bits unpacked to one per byte (`unpack`), or packed into bytes, lowest bits first."""

    bits: int
    unpack: bool

    def __post_init__(self) -> None:
        _need(self.bits in (1, 2, 4), self, "codes of 1, 2 or 4 bits share a byte")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        per = 8 // self.bits
        _need(dtype == "U8" and len(shape) > 1, self, f"needs bytes, got {dtype} {shape}")
        _need(self.unpack or shape[-1] % per == 0, self, f"{shape[-1]} codes do not fill bytes")
        return TensorType(dtype, _swap_last(shape, shape[-1] * per if self.unpack else shape[-1] // per))

    def apply(self, t: Tensor) -> Tensor:
        return self._unpack(t) if self.unpack else self._pack(t)

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        return self._pack(t) if self.unpack else self._unpack(t)

    def _unpack(self, t: Tensor) -> Tensor:
        mask = (1 << self.bits) - 1
        return torch.stack([(t >> shift) & mask for shift in range(0, 8, self.bits)], -1).flatten(-2)

    def _pack(self, t: Tensor) -> Tensor:
        _need(not bool((t >> self.bits).any()), self, "a code has more bits than that")
        parts = t.reshape(*t.shape[:-1], -1, 8 // self.bits)
        out: Tensor = parts[..., 0].clone()
        for i in range(1, 8 // self.bits):
            out |= parts[..., i] << (i * self.bits)
        return out


@dataclass(frozen=True)
class Xor:
    """Every byte XOR `mask`: 0x88 turns offset 4-bit codes into two's complement."""

    mask: int

    def __post_init__(self) -> None:
        _need(0 <= self.mask <= 255, self, "the mask is one byte")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        _need(dtype == "U8", self, f"needs bytes, got {dtype}")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor) -> Tensor:
        return t ^ self.mask

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        return t ^ self.mask


@dataclass(frozen=True)
class Add:
    """`amount` added to every byte, modulo 256."""

    amount: int

    def __post_init__(self) -> None:
        _need(0 <= self.amount <= 255, self, "the amount is one byte")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        _need(dtype == "U8", self, f"needs bytes, got {dtype}")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor) -> Tensor:
        return t + self.amount

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        return t - self.amount


@dataclass(frozen=True)
class Bits:
    """The bits of every 32-bit word permuted: bit i of the result is bit ``order[i]`` of the input."""

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        _need(sorted(self.order) == list(range(32)), self, "the order must name bits 0 to 31 once each")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        _need(dtype == "I32", self, f"needs 32-bit words, got {dtype}")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor) -> Tensor:
        return _permute_bits(t, self.order)

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        inverse = [0] * 32
        for target, source in enumerate(self.order):
            inverse[source] = target
        return _permute_bits(t, tuple(inverse))


def _permute_bits(t: Tensor, order: tuple[int, ...]) -> Tensor:
    """The words with their bits permuted, by one shift and mask per distance that bits move."""
    masks: dict[int, int] = {}
    for to_bit, from_bit in enumerate(order):
        masks[to_bit - from_bit] = masks.get(to_bit - from_bit, 0) | 1 << to_bit
    words = t.reshape(-1)
    out = torch.empty_like(words)
    block = max(words.numel() if t.is_cuda else _BLOCK_WORDS, 1)
    for start in range(0, words.numel(), block):
        source, target = words[start : start + block], out[start : start + block]
        shifted = target  # the first distance is written in place
        for distance, mask in masks.items():
            shift = torch.bitwise_left_shift if distance >= 0 else torch.bitwise_right_shift
            shift(source, abs(distance), out=shifted)
            shifted.bitwise_and_(mask - (1 << 32) if mask >> 31 else mask)
            if shifted is target:
                shifted = torch.empty_like(target)
            else:
                target.bitwise_or_(shifted)
    return out.reshape(t.shape)


@dataclass(frozen=True)
class DtypeView:
    """The same bytes viewed as another dtype; the last axis scales with the element size."""

    source: str
    target: str

    def __post_init__(self) -> None:
        _need({self.source, self.target} <= set(DTYPES), self, f"dtypes must be among {', '.join(DTYPES)}")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        _need(dtype == self.source, self, f"needs {self.source}, got {dtype}")
        nbytes, size = shape[-1] * itemsize(self.source), itemsize(self.target)
        _need(nbytes % size == 0, self, f"rows of {nbytes} bytes do not hold whole elements")
        return TensorType(self.target, _swap_last(shape, nbytes // size))

    def apply(self, t: Tensor) -> Tensor:
        return _view(t, self.target)

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        return _view(t, self.source)


def _view(t: Tensor, dtype: str) -> Tensor:
    """The bytes of `t` as `dtype`, viewed as one axis, since axes of length 1 may have any stride."""
    size, flat = itemsize(dtype), t.reshape(-1)
    if flat.data_ptr() % size or flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()
    last = t.shape[-1] * t.element_size() // size
    return flat.view(DTYPES[dtype]).reshape(*t.shape[:-1], last)


@dataclass(frozen=True)
class Widen:
    """16-bit floats as F32: exact, so that the inverse only drops the added bits."""

    source: str

    def __post_init__(self) -> None:
        _need(self.source in ("BF16", "F16"), self, "only BF16 and F16 widen to F32")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        _need(dtype == self.source, self, f"needs {self.source}, got {dtype}")
        return TensorType("F32", shape)

    def apply(self, t: Tensor) -> Tensor:
        return t.float()

    def undo(self, t: Tensor, dtype: str, shape: Shape) -> Tensor:
        if self.source == "F16":
            return t.half()
        return (_view(t, "I32") >> 16).to(torch.int16).view(torch.bfloat16)  # rounding would change NaNs


STEPS: Mapping[str, type[Step]] = {
    "pad": Pad,
    "flip": Flip,
    "rearrange": Rearrange,
    "codes": PackedCodes,
    "xor": Xor,
    "add": Add,
    "bits": Bits,
    "view": DtypeView,
    "widen": Widen,
}
"""Every step by the name that manifests store."""

_NAMES = {kind: name for name, kind in STEPS.items()}


def step_to_json(step: Step) -> dict[str, Any]:
    """`step` as JSON data: its name and its fields."""
    return {"step": _NAMES[type(step)], **to_json(step)}


def step_from_json(data: Any, where: str) -> Step:
    """The step that untrusted `data` describes; CheckpointError when it describes none."""
    name = data.get("step") if isinstance(data, Mapping) else None
    if not isinstance(name, str) or name not in STEPS:
        raise CheckpointError(f"{where} is no known step; known are {', '.join(STEPS)}.")
    return from_json(STEPS[name], {key: value for key, value in data.items() if key != "step"}, where)
