"""Slices of a checkpoint that are to be written into a prepared layer, by names and numbers of users."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..convert.sources import TensorMapping
from ..convert.sources.packings import check_extra
from ..errors import CheckpointError, UsageError
from ..torch_dtypes import TORCH_DTYPES
from .experts import ExpertLayer

Span = int | tuple[int, int] | None
"""One number, first and last (exclusive), or all for None."""

_BYTES = {torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu}


@dataclass(frozen=True)
class SliceWrite:
    """New numbers for a slice of one canonical role of some experts, in whole experts' terms.

    Attributes:
        role: the canonical role that changes.
        mapping: how it follows from the tensors that `data` is a slice of; None if that is the role itself.
        first, last: numbers of the experts in the whole layer, the last exclusive.
        index: the slice of each expert's tensor.
        full: whether that is all of it.
        direct: whether `data` has the bytes of whole experts' roles in their order.
        data: ``[experts, *sizes of index]``.
    """

    role: str
    mapping: TensorMapping | None
    first: int
    last: int
    index: tuple[slice, ...]
    full: bool
    direct: bool
    data: Tensor

    @property
    def form(self) -> SliceWrite:
        """This write without its numbers: of `data` only its shape and dtype."""
        return replace(self, data=torch.empty(self.data.shape, dtype=self.data.dtype, device="meta"))

    def given(self, t: Tensor) -> SliceWrite:
        """This write of `t`, whose shape and dtype are those of the tensor that it was made for."""
        data, like = t.detach(), self.data
        if data.dtype is not like.dtype:
            data = data.contiguous().view(like.dtype)
        if data.shape != like.shape:
            data = data.reshape(like.shape) if data.numel() == like.numel() else data.expand(like.shape)
        return SliceWrite(
            self.role, self.mapping, self.first, self.last, self.index, self.full, self.direct, data
        )

    def rows(self, height: int) -> tuple[int, int]:
        """First and last row (exclusive) of the role, which has `height`, that may change."""
        if self.mapping is not None:
            return self.mapping.rows
        rows = self.index[0]
        return (0, height) if self.full else (rows.start, rows.stop)

    def fills_rows(self, widths: Sequence[int]) -> bool:
        """Whether nothing of its rows, whose other axes have `widths`, stays as it was."""
        parts = zip(self.index[1:], widths, strict=True)
        return self.full or (self.mapping is None and all((p.start, p.stop) == (0, n) for p, n in parts))

    @property
    def _of_experts(self) -> tuple[slice, ...]:
        return (slice(None), *self.index)

    def write(self, first: int, t: Tensor) -> None:
        """Writes its share of `t`, the whole role of consecutive experts from `first`."""
        low, high = max(first, self.first), min(first + len(t), self.last)
        if low >= high:
            return
        target = t[low - first : high - first]
        data = self.data[low - self.first : high - self.first].to(t.device)
        if self.mapping is None:
            target[self._of_experts] = data
            return
        rows = target[:, self.mapping.rows[0] : self.mapping.rows[1]]
        if not self.full:
            old = self.mapping.packed(rows.contiguous()).clone()
            old[self._of_experts] = data
            data = old
        rows.copy_(in_dtype_of(rows, self.mapping.canonical(data.contiguous())).reshape(rows.shape))

    def plain(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """`data` as canonical experts of `shape` without a copy; None if it has to be converted."""
        if not (self.direct and self.data.is_contiguous()):
            return None
        flat = self.data.reshape(-1)
        if flat.dtype != dtype:
            if flat.data_ptr() % dtype.itemsize:
                return None
            flat = flat.view(dtype)
        return flat.view(self.last - self.first, *shape[1:])


def in_dtype_of(like: Tensor, t: Tensor) -> Tensor:
    """`t` in the dtype of `like`; CheckpointError for numbers that this cannot hold."""
    if t.dtype == like.dtype:
        return t
    rounded = t.to(like.dtype)
    if bool(torch.isfinite(t).all()) and not bool(torch.isfinite(rounded).all()):
        raise CheckpointError(f"a number of {t.dtype} is beyond {like.dtype}, in which the layer computes.")
    return rounded


def slice_write(
    layer: ExpertLayer, name: str, t: Tensor, experts: Span, rows: Span, columns: Span
) -> SliceWrite | None:
    """The write that a user asks for; None for a tensor that holds no weights, which is only checked.

    Raises UsageError for names, numbers or types that do not fit the layer.
    """
    if name in layer.recipe.shapes:
        dtype, (_, *shape) = layer.whole_types[name]
        wanted, mapping, shared = _span(experts, layer.whole_experts, "experts", name), None, False
    else:
        mapping, number = _part(layer, name)
        dtype, shape, shared = mapping.dtype, list(mapping.shape), mapping.shared
        if number is not None and experts is not None:
            raise UsageError(f"{name} names its expert, got experts={experts} too", hint="leave experts out")
        if shared and experts is not None:
            raise UsageError(f"{name} is shared by all experts, got experts={experts}", hint="leave it out")
        wanted = _span(experts if number is None else number, layer.whole_experts, "experts", name)
    index = [slice(0, size) for size in shape]
    for axis, (what, span) in enumerate((("rows", rows), ("columns", columns))):
        if span is not None:
            if axis >= len(shape):
                raise UsageError(f"{name} has no {what}: an expert's is {list(shape)}")
            index[axis] = slice(*_span(span, shape[axis], what, name))
    sizes = [part.stop - part.start for part in index]
    count = wanted[1] - wanted[0]
    data = _of_type(t, dtype, name)
    single = shared or (count == 1 and list(data.shape) == sizes)
    expected = sizes if single else [count, *sizes]
    # A tensor with the rows of all experts under each other.
    stacked = [count * sizes[0], *sizes[1:]] if sizes else expected
    if list(data.shape) not in (expected, stacked):
        raise UsageError(f"{name} must be {expected} for what is to be written, got {list(t.shape)}")
    data = data.expand(count, *sizes) if shared else data.reshape(count, *sizes)
    if mapping is not None and not mapping.role:
        _check_extra(layer, name, mapping, data)
        return None
    role = name if mapping is None else mapping.role
    full, height = sizes == list(shape), layer.whole_types[role].shape[1]
    direct = full and (mapping is None or (mapping.direct and mapping.rows == (0, height)))
    return SliceWrite(role, mapping, *wanted, tuple(index), full, direct, data)


def _part(layer: ExpertLayer, name: str) -> tuple[TensorMapping, int | None]:
    """The mapping of the checkpoint's tensor `name`, and the expert in its name."""
    for template, mapping in layer.parts.items():
        if template == name:
            return mapping, None
        head, mark, tail = template.partition("{expert}")
        if mark and (match := re.fullmatch(re.escape(head) + r"(\d{1,6})" + re.escape(tail), name)):
            return mapping, int(match[1])
    known = [*layer.recipe.shapes, *layer.parts]
    raise UsageError(f"layer {layer.layer} has no tensor {name}", hint=f"its tensors are {', '.join(known)}")


def _span(span: Span, size: int, what: str, name: str) -> tuple[int, int]:
    if span is None:
        return 0, size
    first, last = (span, span + 1) if isinstance(span, int) else span
    if not 0 <= first < last <= size:
        raise UsageError(f"{what} of {name} are 0 to {size - 1}, got {first} to {last - 1}")
    return first, last


def _of_type(t: Tensor, dtype: str, name: str) -> Tensor:
    """`t` as a tensor of `dtype`, bytes of any meaning as uint8; UsageError for another one."""
    t, expected = t.detach(), TORCH_DTYPES[dtype]
    if expected is torch.uint8 and t.dtype in _BYTES:
        return t.contiguous().view(torch.uint8)
    if t.dtype is not expected:
        raise UsageError(
            f"{name} must be {expected} as the checkpoint stores it, got {t.dtype}",
            hint="quantize new weights to the checkpoint's format first",
        )
    return t


def _check_extra(layer: ExpertLayer, name: str, mapping: TensorMapping, data: Tensor) -> None:
    whole = layer.rank_slice.whole if layer.rank_slice else layer.problem
    for values in data.cpu():
        reasons = [check_extra(mapping.stored, whole, values, one_less) for one_less in (False, True)]
        if all(reasons):
            raise CheckpointError(f"{name} {reasons[0]}.", hint="Check the checkpoint.")
