"""Value steps for kernels with 8-bit activations: sums of weights beside them, and zero points for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...files.tensor_table import TensorType
from ..steps.transforms import DTYPES, DtypeView, PackedCodes, Rearrange, Shape
from ..steps.value_steps import ExactStep, Facts, SourceKept, Tensors, named, need
from .chain import Chain

MIDDLE = 8
"""The zero of 4-bit codes that have no zero points: offset codes are ``q + 8``."""

MOST_COLUMNS = 4096
"""Of a block: its sums are taken in 16 bits."""

_EVEN_BYTES = 0x00FF00FF00FF00FF


def _sums_of_bytes(t: Tensor) -> Tensor:
    """``[..., columns]`` bytes, each the sum of two codes, summed as int32: four lanes of 16 bits at once."""
    words = t.view(torch.int64)
    lanes = (words & _EVEN_BYTES).add_((words >> 8).bitwise_and_(_EVEN_BYTES)).sum(-1)
    sums: Tensor = lanes.unsqueeze(-1).view(torch.int16).sum(-1, dtype=torch.int32)
    return sums


@named("codes_and_sums")
@dataclass(frozen=True)
class CodesAndSums(ExactStep):
    """Blocks of packed 4-bit codes u, each with the sums of u - z over its columns behind it.

    A block has `columns` columns of some rows. `codes` move codes ``[e, rows, k]``, one to a byte, to
    ``[e, ..., codes of a block]``, in which every two are then packed; `sums` move the int32 sums
    ``[e, rows, k / columns]`` to ``[e, ..., rows of a block]``. `zero` is the role with the codes of zero
    ``[e, rows, groups]``, each group a whole number of blocks; without one, z is 8. The way back cuts the
    sums off.
    """

    zero: str
    columns: int
    codes: tuple[Rearrange, ...]
    sums: tuple[Rearrange, ...]

    def __post_init__(self) -> None:
        need(
            0 < self.columns <= MOST_COLUMNS and self.columns % 16 == 0,
            f"blocks of {self.columns} columns are no whole words, or more than {MOST_COLUMNS}.",
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
            f"{dtype} {shape} are no packed codes in blocks of {self.columns} columns.",
        )
        _, codes = self._codes.stored_type(dtype, shape)
        _, sums = self._sums.stored_type("I32", (*shape[:2], 2 * shape[2] // self.columns))
        need(codes[:-1] == sums[:-1], f"codes in blocks {codes[:-1]} have no sums in blocks {sums[:-1]}.")
        return TensorType(dtype, (*codes[:-1], codes[-1] + sums[-1]))

    def _summed(self, t: Tensor, others: Tensors) -> Tensor:
        pairs = (t & 15).add_(t >> 4)
        sums = _sums_of_bytes(pairs.reshape(*t.shape[:-1], -1, self.columns // 2))
        if not self.zero:
            return sums.sub_(MIDDLE * self.columns)
        zero = others[self.zero].int()
        groups, blocks = zero.shape[-1], sums.shape[-1]
        need(blocks % groups == 0, f"{blocks} blocks of columns are not whole in {groups} of {self.zero}.")
        return sums.sub_(zero.repeat_interleave(blocks // groups, -1), alpha=self.columns)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        sums = self._sums.apply(self._summed(t, others))
        return torch.cat((self._codes.apply(t), sums), -1)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        chain = self._codes
        _, codes = chain.stored_type(dtype, shape)
        return chain.undo(t[..., : codes[-1]].contiguous(), dtype, shape)


@named("fill")
@dataclass(frozen=True)
class Fill(SourceKept):
    """`number` as `dtype` in place of every element, whatever it is."""

    number: int
    dtype: str

    def __post_init__(self) -> None:
        need(self.dtype in ("U8", "I8") and 0 <= self.number <= 127, f"{self} is no number of one byte.")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType(self.dtype, shape)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        return torch.full_like(t, self.number, dtype=DTYPES[self.dtype])
