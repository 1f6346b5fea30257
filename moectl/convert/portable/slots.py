"""Stored tensors of a container: names, dtypes, shapes, and how canonical rows are packed into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...checkpoint.tensors.shapes import SymbolicShape, shape_at
from ...checkpoint.tensors.storage import Storage, StoredTensor, format_sizes
from ...checkpoint.tensors.stored_formats import StoredFormat, format_in
from ...errors import UsageError
from ...lazy_torch import Tensor, torch
from ...problem.moe_problem import MoEProblem
from ...problem.number_formats import NumberFormat
from ...problem.schemes import FULL, WeightFormat
from ..canonical import halves
from ..recipe.chain import Chain
from ..sources.map_layer import ROLE_AND_HALF, is_transposed
from ..sources.packings import PACKINGS, TRANSPOSED
from ..steps.transforms import DTYPES, Shape, Step
from ..steps.value_steps import Shapes, Tensors


@dataclass(frozen=True)
class Slot:
    """One kind of stored tensor of a layer.

    Attributes:
        template: its name, with ``{expert}`` if each expert has its own tensor.
        role: canonical role that it stores; empty for a tensor whose values follow from sizes.
        rows: first and last row (exclusive) of that role.
        dtype: dtype in the file's header.
        shape: shape for one expert.
        steps: from the stored tensor to canonical rows; their inverse is applied on writing.
        raw: dtype of the elements that the steps move.
        fill: values of a tensor without a role: one, or those of its last axis.
        divisor: whether it holds the reciprocal.
        limits: smallest and largest value that it can hold.
        fused: whether it is one tensor for all experts, with an expert axis in front.
    """

    template: str
    role: str
    rows: tuple[int, int]
    dtype: str
    shape: Shape
    steps: tuple[Step, ...] = ()
    raw: str = "U8"
    fill: tuple[int, ...] = ()
    divisor: bool = False
    limits: tuple[int, int] | None = None
    fused: bool = False

    def stored(self, batch: Tensors, experts: int) -> Tensor:
        """The stored tensors ``[experts, *shape]`` of the experts whose new roles are in `batch`."""
        shape = (experts, *self.shape)
        if not self.role:
            values = torch.tensor(self.fill, dtype=DTYPES.get(self.raw, torch.int64))
            return values.expand(shape)
        rows = batch[self.role][:, self.rows[0] : self.rows[1]]
        if self.limits is not None:
            self._check_limits(rows)
        if self.divisor:
            rows = rows.reciprocal()
        if not self.steps:
            return rows.reshape(shape)
        return Chain(self.steps).undo(rows.contiguous(), self.raw, shape)

    def _check_limits(self, rows: Tensor) -> None:
        low, high = (int(value) for value in rows.aminmax())
        assert self.limits is not None
        if low < self.limits[0] or high > self.limits[1]:
            raise UsageError(
                f"{self.role} has zero points from {low} to {high}; the container holds "
                f"{self.limits[0]} to {self.limits[1]} ({self.template}).",
                hint="Choose another --container.",
            )


def container_format(container: str, weight: WeightFormat) -> StoredFormat:
    """How a container stores `weight`; UsageError if it cannot."""
    form = format_in(container, weight)
    if form is None:
        raise UsageError(f"a {container} container cannot hold weights in {weight}.")
    return form


def slots(
    storage: Storage,
    problem: MoEProblem,
    prefix: str,
    shapes: Shapes,
    roles: Mapping[str, tuple[str, int | None]] = ROLE_AND_HALF,
) -> Iterator[Slot]:
    """The stored tensors of a layer of `problem` in `storage`, with names that begin with `prefix`.

    `shapes` are the canonical roles of the new format; `roles` maps a stored matrix to its role and the half
    of the role's rows that it holds (None for all rows).
    """
    weight, packing = problem.scheme.weight, storage.format.packing
    sizes = {
        "experts": problem.experts,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
        **format_sizes(problem.scheme),
    }
    packed = PACKINGS[packing].steps(weight.bits, True)
    for leaf, stored in storage.tensors.items():
        matrix, _, kind = stored.role.partition("_")
        role, half = roles[matrix]
        role = f"{role}_{kind}" if kind else role
        whole = shape_at(_written_shape(stored, packing), sizes)
        shape = whole[1:] if storage.fused else whole
        if role in shapes:
            raw, (_, total, *_) = shapes[role]
            dtype = _header_dtype(weight.number, kind) if raw == "U8" else raw
            steps = packed.get(kind, ())
            if steps and kind in ("", "zero"):
                raw = dtype = "I32"
            if is_transposed(storage, matrix, shape):
                steps = TRANSPOSED + steps
            yield Slot(
                prefix + leaf,
                role,
                _rows(half, total, halves(problem, "w13")),
                dtype,
                shape,
                steps,
                raw,
                limits=_limits(packing, kind, weight),
                divisor=packing == "divisors" and kind in ("global", "input"),
                fused=storage.fused,
            )
        elif (constant := _constant(packing, matrix, kind, problem)) is not None:
            dtype, values = constant
            yield Slot(prefix + leaf, "", (0, 0), dtype, shape, raw=dtype, fill=values, fused=storage.fused)


def _header_dtype(number: NumberFormat, kind: str) -> str:
    """The safetensors dtype of a byte tensor: that of its numbers if one byte holds one, else U8."""
    if kind == "scale" and number.byte_scale == "F8_E4M3":
        return number.byte_scale
    return number.grid.dtype if not kind else "U8"


def _rows(half: int | None, total: int, parts: int) -> tuple[int, int]:
    """The rows of a matrix among the `total` rows of a role; all of them if both halves share one."""
    if half is None or total < parts:
        return 0, total
    size = total // parts
    return half * size, (half + 1) * size


def _limits(packing: str, kind: str, weight: WeightFormat) -> tuple[int, int] | None:
    """Smallest and largest zero point of a container's packed codes; GPTQ's first version stores one less."""
    if kind != "zero":
        return None
    least = int(packing == "gptq")
    return least, (1 << weight.bits) - 1 + least


def _written_shape(stored: StoredTensor, packing: str) -> SymbolicShape:
    """The shape that is written if several can be read: compressed-tensors' scalars have an axis."""
    shapes = (stored.shape, *stored.others)
    return next(shape for shape in shapes if shape or packing != "divisors")


def _constant(
    packing: str, matrix: str, kind: str, problem: MoEProblem
) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and values of a tensor that follows from format and sizes; None for one that is not written."""
    weight, n, k = problem.scheme.weight, problem.dims.intermediate, problem.dims.hidden
    if matrix == "w2":
        n, k = k, n
    if kind == "shape":
        return "I64", (n, k)
    if packing != "gptq":
        return None
    if kind == "order":
        group = k if weight.group == FULL else weight.group
        return "I32", tuple(column // group for column in range(k))
    if kind == "zero":
        # The middle of the codes, minus one as stored.
        code = (1 << (weight.bits - 1)) - 1
        return "I32", (int.from_bytes(bytes([code if weight.bits == 8 else code * 17] * 4), "little"),)
    return None
