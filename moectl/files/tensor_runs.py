"""`TensorRuns`: headers of tensors that are described, not stored, without a record for each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..dtypes import DTYPE_BITS
from .tensor_table import TensorInfo, TensorType

_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,6})(?!\d)", re.ASCII)


class TensorRun(NamedTuple):
    """Tensors of one dtype and shape, whose names differ in a number: `before`, 0 to `numbers` - 1, `after`.

    A single tensor has no `numbers`, and is named `before`.

    Example:
        >>> run = TensorRun(TensorType("BF16", (8, 4)), "experts.", ".weight", 2)
        >>> list(run.names())
        ['experts.0.weight', 'experts.1.weight']
    """

    type: TensorType
    before: str
    after: str = ""
    numbers: int | None = None

    def names(self) -> Iterator[str]:
        """The names in the order of their numbers."""
        if self.numbers is None:
            yield self.before
            return
        for number in range(self.numbers):
            yield f"{self.before}{number}{self.after}"

    def info(self, name: str) -> TensorInfo:
        """The tensor `name` of the run, in no file."""
        dtype, shape = self.type
        return TensorInfo(name, dtype, shape, "", 0, math.prod(shape) * DTYPE_BITS[dtype] // 8)


class TensorRuns(Mapping[str, TensorInfo]):
    """Tensors by name, run after run, that are in no file: each has the file ``""`` and starts at 0.

    A model's hundreds of thousands of experts' tensors are a few thousand runs. Equal to a mapping with the
    same tensors.

    Example:
        >>> runs = TensorRuns([TensorRun(TensorType("BF16", (8, 4)), "experts.", ".weight", 2)])
        >>> len(runs), "experts.2.weight" in runs, runs["experts.1.weight"].nbytes
        (2, False, 64)
    """

    def __init__(self, runs: Iterable[TensorRun]) -> None:
        self.runs = tuple(runs)
        self._single = {run.before: run for run in self.runs if run.numbers is None}
        self._numbered = {(run.before, run.after): run for run in self.runs if run.numbers is not None}
        self._length = sum(1 if run.numbers is None else run.numbers for run in self.runs)

    def __getitem__(self, name: str) -> TensorInfo:
        run = self._single.get(name) or self._run_with(name)
        if run is None:
            raise KeyError(name)
        return run.info(name)

    def __iter__(self) -> Iterator[str]:
        return (name for run in self.runs for name in run.names())

    def __len__(self) -> int:
        return self._length

    def _run_with(self, name: str) -> TensorRun | None:
        """The run of several tensors that has `name`."""
        for match in _NUMBER.finditer(name):
            run = self._numbered.get((name[: match.start()], name[match.end() :]))
            if run is not None and run.numbers is not None and int(match[0]) < run.numbers:
                return run
        return None
