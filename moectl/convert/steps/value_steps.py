"""Value steps: named changes of numbers, where a chain's steps only move them.

A backend that rescales scales, folds numbers of the whole layer into them, or stores codes in another
number system gets such a step in front of the chain. Each is a frozen record without tensors, written
into manifests by name. What a step loses is kept beside its result as a ``source.*`` tensor, so that the
way back is bit-exact; a step that loses nothing says so and is undone. A step that replaces weights by
others is `lossy`: nothing is kept for it, and there is no way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...files.records import from_json, to_json
from ...files.tensor_table import TensorType
from .transforms import Shape

Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, TensorType]
"""Shape and storage dtype by role, experts first."""


@dataclass(frozen=True, order=True)
class ExpertStatistic:
    """A number about all experts of one canonical role of a layer, taken before any batch is converted.

    `kind` names a row of `FACTS`. With shards, the layer is what the rank holds.
    """

    role: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}({self.role})"


@dataclass(frozen=True)
class StatisticReduction:
    """How a `ExpertStatistic` comes about: `of` a batch of experts, then `join` of what batches gave."""

    of: Callable[[Tensor], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]


def _largest_e4m3(t: Tensor) -> Tensor:
    return t.view(torch.float8_e4m3fn).float().amax()


FACTS: Mapping[str, StatisticReduction] = {
    "max": StatisticReduction(lambda t: t.amax(), torch.maximum),
    "max_e4m3": StatisticReduction(_largest_e4m3, torch.maximum),
}
"""Kinds of facts: the largest value; of bytes that are E4M3 numbers, the largest as float32."""

Facts = Mapping[ExpertStatistic, Tensor]


@runtime_checkable
class ValueStep(Protocol):
    """One named change of a canonical role's numbers; axis 0 is the expert and stays."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Other canonical roles that it needs, of the same experts."""

    @property
    def facts(self) -> tuple[ExpertStatistic, ...]:
        """What it needs to know of the whole layer."""

    @property
    def exact(self) -> bool:
        """True when `undo` gives every input back bit for bit (`lossy`: its replacement); no facts."""

    @property
    def lossy(self) -> bool:
        """True when what it loses is not kept."""

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        """What comes out for an input of `shape` and `dtype`; CheckpointError if it cannot be."""

    def apply(self, t: Tensor, others: Tensors, facts: Facts) -> Tensor:
        """The changed tensor; CheckpointError for a number that has no place in the result."""

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        """The input, of `shape` and `dtype`, that `apply` turns into `t`; only where `exact`."""


class ExactStep:
    """What most exact value steps have in common: they need nothing else and keep the shape."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def facts(self) -> tuple[ExpertStatistic, ...]:
        return ()

    @property
    def exact(self) -> bool:
        return True

    @property
    def lossy(self) -> bool:
        return False

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        return TensorType(dtype, shape)


class SourceKept(ExactStep):
    """What most other value steps have in common: their source is kept, and they are not undone."""

    @property
    def exact(self) -> bool:
        return False

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        raise AssertionError(f"{self} is not undone")


VALUES: dict[str, type[ValueStep]] = {}
"""Every value step by its name in a manifest."""

Kind = TypeVar("Kind", bound="type[Any]")


def named(name: str) -> Callable[[Kind], Kind]:
    """Registers a value step under `name`."""

    def register(kind: Kind) -> Kind:
        assert name not in VALUES
        VALUES[name] = kind
        return kind

    return register


def need(holds: bool, why: str) -> None:
    """CheckpointError with the sentence `why` unless `holds`."""
    if not holds:
        raise CheckpointError(why)


def value_to_json(value: ValueStep) -> dict[str, Any]:
    """`value` as JSON data: its name and its fields."""
    name = next(name for name, kind in VALUES.items() if kind is type(value))
    return {"value": name, **to_json(value)}


def value_from_json(data: Any, where: str) -> ValueStep:
    """The value step that untrusted `data` describes; CheckpointError when it describes none."""
    name = data.get("value") if isinstance(data, Mapping) else None
    if not isinstance(name, str) or name not in VALUES:
        raise CheckpointError(f"{where} is no known value step; known are {', '.join(VALUES)}.")
    return from_json(VALUES[name], {key: item for key, item in data.items() if key != "value"}, where)


def take_facts(
    wanted: tuple[ExpertStatistic, ...], batch: Tensors, before: Facts
) -> dict[ExpertStatistic, Tensor]:
    """`wanted` of all batches so far: those of `before` joined with what `batch` gives."""
    found: dict[ExpertStatistic, Tensor] = {}
    for fact in wanted:
        rule = FACTS[fact.kind]
        now = rule.of(batch[fact.role])
        found[fact] = rule.join(before[fact], now) if fact in before else now
    return found
