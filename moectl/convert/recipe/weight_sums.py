"""Value steps for kernels with 8-bit activations: column sums stored with the codes, constant zero points."""

from __future__ import annotations

from dataclasses import dataclass

from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor, torch
from ..steps.transforms import DTYPES, DtypeView, PackedCodes, Rearrange, Shape
from ..steps.value_steps import ExactStep, SourceKept, Statistics, Tensors, named, need
from .chain import Chain

MIDDLE = 8
"""The implied zero point of symmetric 4-bit codes: offset codes are ``q + 8``."""

MAX_COLUMNS = 4096
"""Largest number of columns of a block: its sums are accumulated in 16 bits."""

_EVEN_BYTES = 0x00FF00FF00FF00FF


def _sums_of_bytes(t: Tensor) -> Tensor:
    """int32 sums of ``[..., columns]`` bytes, each the sum of two codes, accumulated in 4 x 16 bits."""
    words = t.view(torch.int64)
    partial = (words & _EVEN_BYTES).add_((words >> 8).bitwise_and_(_EVEN_BYTES)).sum(-1)
    sums: Tensor = partial.unsqueeze(-1).view(torch.int16).sum(-1, dtype=torch.int32)
    return sums


@named("codes_and_sums")
@dataclass(frozen=True)
class CodesAndSums(ExactStep):
    """Blocks of packed 4-bit codes u, each followed by the sums of u - z over its columns.

    A block has `columns` columns of some rows. `codes` rearrange codes ``[e, rows, k]``, one per byte, to
    ``[e, ..., codes of a block]``, which are then packed in pairs; `sums` rearrange the int32 sums
    ``[e, rows, k / columns]`` to ``[e, ..., rows of a block]``. `zero` is the role with the zero points
    ``[e, rows, groups]``, each group a whole number of blocks; without one, z is 8. The inverse drops the
    sums.
    """

    zero: str
    columns: int
    codes: tuple[Rearrange, ...]
    sums: tuple[Rearrange, ...]

    def __post_init__(self) -> None:
        need(
            0 < self.columns <= MAX_COLUMNS and self.columns % 16 == 0,
            f"blocks of {self.columns} columns are not whole words, or more than {MAX_COLUMNS}.",
        )

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.zero,) if self.zero else ()

    @property
    def _codes(self) -> Chain:
        return Chain((PackedCodes(4, True), *self.codes, PackedCodes(4, False)))

    @property
    def _sums(self) -> Chain:
        return Chain((*self.sums, DtypeView("I32", "U8")))

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        need(
            dtype == "U8" and len(shape) == 3 and 2 * shape[2] % self.columns == 0,
            f"{dtype} {shape} are not packed codes in blocks of {self.columns} columns.",
        )
        _, codes = self._codes.stored_type(dtype, shape)
        _, sums = self._sums.stored_type("I32", (*shape[:2], 2 * shape[2] // self.columns))
        need(codes[:-1] == sums[:-1], f"codes in blocks {codes[:-1]} do not fit sums in blocks {sums[:-1]}.")
        return TensorType(dtype, (*codes[:-1], codes[-1] + sums[-1]))

    def _summed(self, t: Tensor, others: Tensors) -> Tensor:
        pairs = (t & 15).add_(t >> 4)
        sums = _sums_of_bytes(pairs.reshape(*t.shape[:-1], -1, self.columns // 2))
        if not self.zero:
            return sums.sub_(MIDDLE * self.columns)
        zero = others[self.zero].int()
        groups, blocks = zero.shape[-1], sums.shape[-1]
        need(
            blocks % groups == 0,
            f"{blocks} blocks of columns do not divide into {groups} groups of {self.zero}.",
        )
        return sums.sub_(zero.repeat_interleave(blocks // groups, -1), alpha=self.columns)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        sums = self._sums.apply(self._summed(t, others))
        return torch.cat((self._codes.apply(t), sums), -1)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        chain = self._codes
        _, codes = chain.stored_type(dtype, shape)
        return chain.undo(t[..., : codes[-1]].contiguous(), dtype, shape)


@named("fill")
@dataclass(frozen=True)
class Fill(SourceKept):
    """Every element replaced with `number` as `dtype`."""

    number: int
    dtype: str

    def __post_init__(self) -> None:
        need(self.dtype in ("U8", "I8") and 0 <= self.number <= 127, f"{self} does not fit one byte.")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType(self.dtype, shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        return torch.full_like(t, self.number, dtype=DTYPES[self.dtype])
