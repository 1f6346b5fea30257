"""Value steps of stored numbers: repeated, inverted or rounded on the way to canonical rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...files.tensor_table import TensorType
from ..transforms import DTYPES, Shape
from ..values import Exact, Facts, Tensors, named


@named("repeated")
@dataclass(frozen=True)
class Repeated(Exact):
    """One number an expert as `times` rows of one: a scale that gate and up share."""

    times: int

    def __post_init__(self) -> None:
        if not 1 <= self.times <= 1 << 16:
            raise CheckpointError(f"{self}: a number is repeated 1 to 65536 times.")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        if math.prod(shape[1:]) != 1:
            raise CheckpointError(f"{self}: needs one number an expert, got {list(shape)}.")
        return TensorType(dtype, (shape[0], self.times, 1))

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        return t.reshape(-1, 1, 1).expand(-1, self.times, 1)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t[:, :1].reshape(shape)


@named("reciprocal")
@dataclass(frozen=True)
class Reciprocal(Exact):
    """Numbers that divide as F32 factors. Rounded, so `undo` gives a number near the stored one."""

    @property
    def exact(self) -> bool:
        return False

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        if dtype != "F32":
            raise CheckpointError(f"{self}: needs F32, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        if not bool((torch.isfinite(t) & (t > 0)).all()):
            raise CheckpointError(
                "a global scale that divides must be a positive number, got 0, a negative or no number.",
                hint="Fetch the checkpoint again; its weights would be infinite.",
            )
        return t.reciprocal()

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t.reciprocal().reshape(shape)


@named("rounded")
@dataclass(frozen=True)
class Rounded(Exact):
    """Floats of one width as the nearest of another; `undo` gives the rounded numbers back."""

    source: str
    target: str

    def __post_init__(self) -> None:
        if not {self.source, self.target} <= {"BF16", "F16", "F32"}:
            raise CheckpointError(f"{self}: rounds between BF16, F16 and F32.")

    @property
    def exact(self) -> bool:
        return False

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        if dtype != self.source:
            raise CheckpointError(f"{self}: needs {self.source}, got {dtype}.")
        return TensorType(self.target, shape)

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        rounded = t.to(DTYPES[self.target])
        if not bool(torch.isfinite(rounded).all()) and bool(torch.isfinite(t).all()):
            raise CheckpointError(
                f"a number of {self.source} is beyond {self.target}, the model's dtype.",
                hint="State the dtype that the tensors have in config.json.",
            )
        return rounded

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t.to(DTYPES[self.source]).reshape(shape)
