"""Stored tensors of a container: names, dtypes, shapes, and the way from canonical rows to their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.tensors.storage import format_sizes, parse_shape
from ...checkpoint.tensors.stored_formats import FORMATS, SHOWN, Format, Suffix
from ...errors import UsageError
from ...schemes import FULL, Scheme, WeightFormat
from ..chain import Chain
from ..sources.packings import PACKINGS
from ..transforms import DTYPES, Shape, Step
from ..values import Tensors

DTYPE: Mapping[str, Mapping[str, str]] = {
    "fp8": {"": "F8_E4M3"},
    "mxfp8": {"": "F8_E4M3"},
    "nvfp4": {"_scale": "F8_E4M3", "_global": "F32", "_input": "F32"},
}
"""Safetensors dtypes of bytes that are numbers, by format and role; U8 where nothing stands here."""


@dataclass(frozen=True)
class Slot:
    """One kind of stored tensor of a layer.

    Attributes:
        template: its name, ``{expert}`` left in where each expert has one.
        kind: what its role adds to its matrix's: ``""``, ``_scale``, ``_shape``, ...
        role: canonical role that it is made of; ``""`` for what sizes alone say.
        rows: first and last row (exclusive) of that role.
        dtype: as the file states it.
        shape: of one expert's.
        steps: from the stored tensor to canonical rows; undone on writing.
        raw: dtype of the bytes that the steps move.
        fill: for a tensor that is not made of a role, its numbers: one, or those of its last axis.
        divisor: it holds the reciprocal.
        limits: smallest and largest number that it can hold.
        fused: one tensor for all experts, with their axis first.
    """

    template: str
    kind: str
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
        """The tensors ``[experts, *shape]`` of the experts whose new canonical roles `batch` holds."""
        shape = (experts, *self.shape)
        if not self.role:
            numbers = torch.tensor(self.fill, dtype=DTYPES.get(self.raw, torch.int64))
            return numbers.expand(shape)
        rows = batch[self.role][:, self.rows[0] : self.rows[1]]
        if self.limits is not None:
            self._check_limits(rows)
        if self.divisor:
            rows = rows.reciprocal()
        if not self.steps:
            return rows.reshape(shape)
        return Chain(self.steps).undo(rows.contiguous(), shape, self.raw)

    def _check_limits(self, rows: Tensor) -> None:
        low, high = (int(found) for found in rows.aminmax())
        assert self.limits is not None
        if low < self.limits[0] or high > self.limits[1]:
            raise UsageError(
                f"{self.role} has zero points from {low} to {high}; the container holds "
                f"{self.limits[0]} to {self.limits[1]} ({self.template}).",
                hint="Choose another --container.",
            )


def format_row(storage: str, weight: WeightFormat, leaves: frozenset[str] = frozenset()) -> Format:
    """How `storage` stores `weight`: the first row whose block fits, and that has all `leaves`.

    UsageError when it has no such tensors.
    """
    for form in FORMATS:
        sides = zip(form.weight.block, weight.block, strict=True)
        if (
            storage in form.storages
            and form.weight.name == weight.name
            and all(known in (SHOWN, asked) for known, asked in sides)
            and leaves <= form.suffixes.keys()
        ):
            return form
    raise UsageError(f"no {storage} container holds weights that are {weight}.")


@dataclass(frozen=True)
class Sizes:
    """One stored matrix: rows and columns, and the rows of its role that it fills.

    Attributes:
        role: canonical role of its codes.
        part, parts: it is the `part`-th of as many equal parts of the role's rows.
    """

    role: str
    n: int
    k: int
    part: int = 0
    parts: int = 1

    def rows(self, total: int) -> tuple[int, int]:
        """Its rows among the `total` of a role: all, of a role with one row for all parts."""
        if total < self.parts:
            return 0, total
        each = total // self.parts
        return self.part * each, (self.part + 1) * each


def slots(
    form: Format,
    scheme: Scheme,
    module: str,
    sizes: Sizes,
    shapes: Mapping[str, tuple[Shape, str]],
) -> Iterator[Slot]:
    """The tensors of one matrix in a container, with names that begin with `module`.

    `form` says which tensors there are, `shapes` the canonical roles of the new format.
    """
    numbers = {**format_sizes(scheme), "n": sizes.n, "k": sizes.k}
    weight = scheme.weight
    steps = PACKINGS[form.packing].steps(weight.bits, True)
    for suffix, stored in form.suffixes.items():
        kind, role = stored.role, sizes.role + stored.role
        shape = tuple(axis.value(numbers) for axis in parse_shape(_text(stored, form)))
        name = f"{module}.{suffix}"
        if role in shapes:
            (_, total, *_), raw = shapes[role]
            dtype = DTYPE.get(weight.name, {}).get(kind, raw) if raw == "U8" else raw
            moved = steps.get(kind.removeprefix("_"), ())
            packed = "I32" if moved and kind in ("", "_zero") else raw
            yield Slot(
                name,
                kind,
                role,
                sizes.rows(total),
                packed if packed != raw else dtype,
                shape,
                moved,
                packed,
                limits=_limits(form, kind, weight),
                divisor=form.packing == "divisors" and kind in ("_global", "_input"),
            )
        elif (filled := _filled(form, kind, weight, sizes)) is not None:
            dtype, numbers_of = filled
            yield Slot(name, kind, "", (0, 0), dtype, shape, raw=dtype, fill=numbers_of)


def _limits(form: Format, kind: str, weight: WeightFormat) -> tuple[int, int] | None:
    """What zero points a container's packed codes hold; GPTQ's first version stores one less."""
    if kind != "_zero":
        return None
    least = int(form.packing == "gptq")
    return least, (1 << weight.bits) - 1 + least


def _text(stored: Suffix, form: Format) -> str:
    """The shape that is written, of several that are read."""
    texts = [text for text in stored.shapes if text] if form.packing == "divisors" else stored.shapes
    return texts[0].format(n="n", k="k")


def _filled(
    form: Format, kind: str, weight: WeightFormat, sizes: Sizes
) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and numbers of a tensor that the format and sizes say; None for one that is left out."""
    if kind == "_shape":
        return "I64", (sizes.n, sizes.k)
    if form.packing != "gptq":
        return None
    if kind == "_order":
        group = sizes.k if weight.group == FULL else weight.group
        return "I32", tuple(at // group for at in range(sizes.k))
    if kind == "_zero":
        # The middle of the codes, stored less one.
        code = (1 << (weight.bits - 1)) - 1
        return "I32", (int.from_bytes(bytes([code if weight.bits == 8 else code * 17] * 4), "little"),)
    return None
