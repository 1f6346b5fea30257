"""`TensorRuns`: headers of tensors that are described, not stored, without a record for each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..dtypes import DTYPE_BITS
from .tensor_table import TensorInfo, TensorType

_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,6})(?!\d)", re.ASCII)
_LAST_NUMBER = re.compile(r"(.*\.)(0|[1-9]\d{0,6})(\..*)", re.ASCII | re.DOTALL)


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

    @property
    def nbytes(self) -> int:
        """Bytes of each tensor."""
        return math.prod(self.type.shape) * DTYPE_BITS[self.type.dtype] // 8

    def infos(self) -> Iterator[TensorInfo]:
        """The tensors in the order of their numbers, in no file."""
        (dtype, shape), nbytes = self.type, self.nbytes
        return (TensorInfo(name, dtype, shape, "", 0, nbytes) for name in self.names())


class TensorRuns(Mapping[str, TensorInfo]):
    """Tensors by name, run after run, that are in no file: each has the file ``""`` and starts at 0.

    A model's hundreds of thousands of experts' tensors are a few thousand runs. Equal to a mapping with the
    same tensors.

    Example:
        >>> runs = TensorRuns([TensorRun(TensorType("BF16", (8, 4)), "experts.", ".weight", 2)])
        >>> len(runs), "experts.2.weight" in runs, runs["experts.1.weight"].nbytes
        (2, False, 64)
    """

    files = ("",)
    """As `TensorTable.files`."""

    def __init__(self, runs: Iterable[TensorRun]) -> None:
        self.runs = tuple(runs)
        self._single = {run.before: run for run in self.runs if run.numbers is None}
        self._numbered = {
            (run.before, run.after): (run.numbers, *run.type, run.nbytes)
            for run in self.runs
            if run.numbers is not None
        }
        self._length = sum(1 if run.numbers is None else run.numbers for run in self.runs)

    def __getitem__(self, name: str) -> TensorInfo:
        if name in self._single:
            return next(self._single[name].infos())
        # Nearly always it is the last number that tells a run's tensors apart.
        last = _LAST_NUMBER.fullmatch(name)
        info = self._numbered_info(name, last[1], last[2], last[3]) if last else None
        if info is None:
            for match in _NUMBER.finditer(name):
                info = info or self._numbered_info(name, name[: match.start()], match[0], name[match.end() :])
        if info is None:
            raise KeyError(name)
        return info

    def _numbered_info(self, name: str, before: str, number: str, after: str) -> TensorInfo | None:
        """The tensor `name`, given in its parts, if a run has it."""
        found = self._numbered.get((before, after))
        if found is None or int(number) >= found[0]:
            return None
        return TensorInfo(name, found[1], found[2], "", 0, found[3])

    def __iter__(self) -> Iterator[str]:
        return (name for run in self.runs for name in run.names())

    def __len__(self) -> int:
        return self._length
