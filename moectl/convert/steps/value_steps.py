"""Value steps: named changes of numbers; the steps of a chain only move them.

A backend that rescales scales, folds a statistic of the whole layer into them, or stores codes in another
number system has such a step before the chain. Each is a frozen record without tensors, written into
manifests by name. The input of a step that loses information is kept as a ``source.*`` tensor, so that it
can be restored bit for bit; an `exact` step is undone instead. A step that replaces weights with others is
`lossy`: its input is not kept and cannot be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from ...errors import CheckpointError
from ...files.records import from_json, to_json
from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor, torch
from .transforms import Shape

Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, TensorType]
"""Shape and storage dtype by role, experts first."""


@dataclass(frozen=True, order=True)
class ExpertStatistic:
    """A number over all experts of one canonical role of a layer, computed before any batch is converted.

    `kind` names a row of `STATISTICS`. For a rank of several, the layer is the rank's slice of it, except for
    scales of inputs: those are of all experts, wherever they are.
    """

    role: str
    kind: str

    @property
    def of_layer(self) -> bool:
        """True for a number over the experts of all ranks."""
        return self.role.endswith("_input")

    def __str__(self) -> str:
        return f"{self.kind}({self.role})"


Statistics = Mapping[ExpertStatistic, Tensor]


def _largest_e4m3(t: Tensor) -> Tensor:
    parts = torch.split(t.reshape(-1), 1 << 18)
    return torch.stack([part.view(torch.float8_e4m3fn).float().amax() for part in parts]).amax()


STATISTICS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "max": lambda t: t.amax(),
    "max_e4m3": lambda t: _largest_e4m3(t),
}
"""Maxima over a batch of experts by kind: of the values, and of bytes that are E4M3 numbers, as float32."""


@runtime_checkable
class ValueStep(Protocol):
    """One named change of a canonical role's numbers; axis 0 is the expert and stays."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The other canonical roles that it reads, of the same experts."""

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        """The statistics of the whole layer that it needs."""

    @property
    def exact(self) -> bool:
        """True when `undo` restores every input bit for bit (of a `lossy` step: its replacement).

        An exact step needs no statistics.
        """

    @property
    def lossy(self) -> bool:
        """True when it loses information and its input is not kept."""

    @property
    def by_rows(self) -> bool:
        """True when a row of the result, of the input's type, follows from that row of all it reads."""

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        """The result's type for an input of `shape` and `dtype`; CheckpointError if it does not fit."""

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        """The changed tensor; CheckpointError for a number that the result cannot represent."""

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        """The inverse of `apply`: the input of `shape` and `dtype` that became `t`; only of `exact` steps."""


class ExactStep:
    """Defaults of exact value steps: no other roles, no statistics, the same dtype and shape."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def statistics(self) -> tuple[ExpertStatistic, ...]:
        return ()

    @property
    def exact(self) -> bool:
        return True

    @property
    def lossy(self) -> bool:
        return False

    @property
    def by_rows(self) -> bool:
        return False

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType(dtype, shape)


class SourceKept(ExactStep):
    """Defaults of value steps whose input is kept, so that they are never undone."""

    @property
    def exact(self) -> bool:
        return False

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        raise AssertionError(f"{self} has no inverse: its input is kept")


class RowByRow(ExactStep):
    """Defaults of steps that are `by_rows`."""

    @property
    def by_rows(self) -> bool:
        return True


ROWS_AT_ONCE = 32
"""Into how many parts the rows of a tensor are divided that changes in place, if it has so many."""


def apply_in_place(step: ValueStep, t: Tensor, others: Tensors, statistics: Statistics) -> None:
    """Replaces `t` by what a step that is `by_rows` makes of it, some rows at a time to save memory."""
    for rows in some_rows(t):
        read = {role: others[role][:, rows] for role in step.reads}
        t[:, rows] = step.apply(t[:, rows].contiguous(), read, statistics)


def undo_in_place(step: ValueStep, t: Tensor, dtype: str, others: Tensors) -> None:
    """Undoes `apply_in_place`."""
    for rows in some_rows(t):
        read, some = {role: others[role][:, rows] for role in step.reads}, t[:, rows].contiguous()
        t[:, rows] = step.undo(some, dtype, tuple(some.shape), read)


def some_rows(t: Tensor) -> Iterator[slice]:
    """The rows of ``[experts, rows, ...]`` in parts."""
    size = -(-t.shape[1] // ROWS_AT_ONCE)
    return (slice(first, first + size) for first in range(0, t.shape[1], size))


VALUE_STEPS: dict[str, type[ValueStep]] = {}
"""Every value step by its name in a manifest."""

Kind = TypeVar("Kind", bound="type[Any]")


def named(name: str) -> Callable[[Kind], Kind]:
    """Registers a value step under `name`, which manifests store."""

    def register(kind: Kind) -> Kind:
        assert name not in VALUE_STEPS
        VALUE_STEPS[name] = kind
        return kind

    return register


def need(holds: bool, why: str) -> None:
    """Raises CheckpointError with the sentence `why` unless `holds`."""
    if not holds:
        raise CheckpointError(why)


def value_to_json(value: ValueStep) -> dict[str, Any]:
    """`value` as JSON data: its name and its fields."""
    name = next(name for name, kind in VALUE_STEPS.items() if kind is type(value))
    return {"value": name, **to_json(value)}


def value_from_json(data: Any, where: str) -> ValueStep:
    """The value step that untrusted `data` describes; CheckpointError when it describes none."""
    name = data.get("value") if isinstance(data, Mapping) else None
    if not isinstance(name, str) or name not in VALUE_STEPS:
        raise CheckpointError(f"{where} is no known value step; known are {', '.join(VALUE_STEPS)}.")
    return from_json(VALUE_STEPS[name], {key: field for key, field in data.items() if key != "value"}, where)


def update_statistics(
    statistics: tuple[ExpertStatistic, ...], batch: Tensors, previous: Statistics
) -> dict[ExpertStatistic, Tensor]:
    """`statistics` over all batches so far: their `previous` values combined with those of `batch`."""
    updated: dict[ExpertStatistic, Tensor] = {}
    for statistic in statistics:
        largest = STATISTICS[statistic.kind](batch[statistic.role])
        before = previous.get(statistic)
        updated[statistic] = largest if before is None else torch.maximum(before, largest)
    return updated
