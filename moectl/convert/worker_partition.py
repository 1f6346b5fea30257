"""Partition of a conversion over several processes or machines that write to one directory."""

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
    """Worker `number`, from 1, of `count`.

    Each converts a run of the layers; the first also copies the passthrough tensors.
    """

    number: int
    count: int

    @property
    def log(self) -> str:
        """Name of this worker's resume log."""
        return f"progress-{self.number}-of-{self.count}.jsonl"

    @property
    def has_passthrough(self) -> bool:
        """True if this worker copies the passthrough tensors."""
        return self.number == 1

    def select(self, items: Sequence[Item]) -> Sequence[Item]:
        """This worker's run of `items`; the lengths of runs differ by at most one."""
        ends = [len(items) * n // self.count for n in (self.number - 1, self.number)]
        return items[ends[0] : ends[1]]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_partition(text: str) -> WorkerPartition:
    """The partition written as ``2/4``; UsageError for anything else.

    Example:
        >>> parse_partition("2/4").select(range(8))
        range(2, 4)
    """
    match = re.fullmatch(r"\s*(\d{1,5})\s*/\s*(\d{1,5})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_PARTS:
        raise UsageError(f"a part must look like 2/4, the second of four, got {text!r}.")
    return WorkerPartition(int(match[1]), int(match[2]))


def partitions_in(folder: Path) -> tuple[WorkerPartition, ...]:
    """The partitions whose logs are in `folder`, in order."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    partitions = [WorkerPartition(int(m[1]), int(m[2])) for name in names if (m := _LOG.fullmatch(name))]
    return tuple(sorted(partitions, key=lambda partition: (partition.count, partition.number)))


def all_partitions(folder: Path) -> tuple[WorkerPartition, ...]:
    """All partitions of the conversion in `folder`, begun or not.

    Raises UsageError if none has been begun, or their counts differ.
    """
    begun = partitions_in(folder)
    sizes = sorted({partition.count for partition in begun})
    if not begun:
        raise UsageError(
            f"{folder} holds no parts of a conversion.", hint="Convert with --part 1/2, --part 2/2 first."
        )
    if len(sizes) > 1:
        raise UsageError(
            f"{folder} holds parts of {' and of '.join(map(str, sizes))}.",
            hint="Convert into an empty directory, with one number of parts.",
        )
    return tuple(WorkerPartition(number, sizes[0]) for number in range(1, sizes[0] + 1))
