"""Activations in a format of their own, with their scales."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..schemes import ActFormat


@dataclass(frozen=True, slots=True)
class Quantized:
    """Tokens as an experts kernel takes them.

    Attributes:
        values: ``[tokens, hidden]`` codes, or ``[tokens, hidden // 2]`` bytes of two 4-bit codes.
        scales: of the blocks that `format` names, in the order that the kernel reads.
        format: what they are.
    """

    values: Tensor
    scales: Tensor
    format: ActFormat

    def __len__(self) -> int:
        return len(self.values)
