"""Parts of a conversion: several processes, or machines, that fill one folder together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import UsageError

Item = TypeVar("Item")

MOST_PARTS = 10_000
_LOG = re.compile(r"progress-(\d{1,5})-of-(\d{1,5})\.jsonl")


@dataclass(frozen=True)
class WorkerPartition:
    """Part `number`, counted from 1, of `of`. Layers go to parts in runs; all the rest is the first's."""

    number: int
    of: int

    @property
    def log(self) -> str:
        """Name of its resume log."""
        return f"progress-{self.number}-of-{self.of}.jsonl"

    @property
    def has_rest(self) -> bool:
        """True when tensors that are no experts are its."""
        return self.number == 1

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Its run of `items`; parts differ by one at most."""
        ends = [len(items) * n // self.of for n in (self.number - 1, self.number)]
        return items[ends[0] : ends[1]]

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def portion_of(text: str) -> WorkerPartition:
    """The part that ``2/4`` names; UsageError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,5})\s*/\s*(\d{1,5})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_PARTS:
        raise UsageError(f"a part must look like 2/4, the second of four, got {text!r}.")
    return WorkerPartition(int(match[1]), int(match[2]))


def portions_in(folder: Path) -> tuple[WorkerPartition, ...]:
    """The parts whose logs lie in `folder`, in order."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = [WorkerPartition(int(m[1]), int(m[2])) for name in names if (m := _LOG.fullmatch(name))]
    return tuple(sorted(found, key=lambda portion: (portion.of, portion.number)))


def all_portions(folder: Path) -> tuple[WorkerPartition, ...]:
    """Every part of the conversion in `folder`, begun or not.

    Raises UsageError when no part was begun there, or they are of several divisions.
    """
    found = portions_in(folder)
    sizes = sorted({portion.of for portion in found})
    if not found:
        raise UsageError(
            f"{folder} holds no parts of a conversion.", hint="Convert with --part 1/2, --part 2/2 first."
        )
    if len(sizes) > 1:
        raise UsageError(
            f"{folder} holds parts of {' and of '.join(map(str, sizes))}.",
            hint="Convert into an empty folder, with one number of parts.",
        )
    return tuple(WorkerPartition(number, sizes[0]) for number in range(1, sizes[0] + 1))
