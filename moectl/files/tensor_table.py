"""`TensorTable`: the headers of many tensors in columns, which creates `TensorInfo` objects on demand."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Set, ValuesView
from dataclasses import dataclass, field
from typing import NamedTuple


class TensorType(NamedTuple):
    """Safetensors dtype (``U8``, ``BF16``, ``F8_E8M0``, ...) and shape of a tensor.

    Example:
        >>> dtype, shape = TensorType("BF16", (2880, 2880))
    """

    dtype: str
    shape: tuple[int, ...]

    def with_first_axis(self, size: int) -> TensorType:
        """The same type with another first axis, which is the number of experts."""
        return TensorType(self.dtype, (size, *self.shape[1:]))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors header, already checked against its file.

    `dtype` is the safetensors spelling (``U8``, ``BF16``, ``F8_E8M0``, ...); `start` and `end` are
    byte offsets in `file`, which is relative to the checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(eq=False)
class TensorTable(Mapping[str, TensorInfo]):
    """Tensors by name, in the order of their files' headers; equal to a mapping with the same tensors.

    Attributes:
        names: name of each row, all different.
        types: the distinct dtypes and shapes; a model has few.
        kinds: index into `types` of each row.
        starts, ends: byte offsets in the file of each row, as in `TensorInfo`.
        files, firsts: the files, and the first row of each.
    """

    names: list[str]
    types: list[TensorType]
    kinds: list[int]
    starts: array[int]
    ends: array[int]
    files: list[str]
    firsts: list[int]
    _rows: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rows = dict(zip(self.names, range(len(self.names)), strict=True))

    def __getitem__(self, name: str) -> TensorInfo:
        return self._at(self._rows[name])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def values(self) -> ValuesView[TensorInfo]:
        return _Values(self)

    def has_all(self, names: Set[str]) -> bool:
        """True when the table has all of `names`."""
        return names <= self._rows.keys()

    @property
    def repeated(self) -> tuple[str, str, str] | None:
        """A duplicate name and the files of its first two rows; None in a valid table."""
        if len(self._rows) == len(self.names):
            return None
        seen: dict[str, int] = {}
        row = next(row for row, name in enumerate(self.names) if seen.setdefault(name, row) != row)
        name = self.names[row]
        return name, self._file(seen[name]), self._file(row)

    def by_file(self) -> Iterator[tuple[str, list[str]]]:
        """Each file with the names of its tensors."""
        for file, first, last in zip(
            self.files, self.firsts, [*self.firsts[1:], len(self.names)], strict=True
        ):
            yield file, self.names[first:last]

    @property
    def empty(self) -> int:
        """Tensors without data."""
        return sum(start == end for start, end in zip(self.starts, self.ends, strict=True))

    def _file(self, row: int) -> str:
        return self.files[bisect_right(self.firsts, row) - 1]

    def _at(self, row: int) -> TensorInfo:
        dtype, shape = self.types[self.kinds[row]]
        return TensorInfo(self.names[row], dtype, shape, self._file(row), self.starts[row], self.ends[row])


class _Values(ValuesView[TensorInfo]):
    """The rows in order, created one at a time."""

    _mapping: TensorTable

    def __iter__(self) -> Iterator[TensorInfo]:
        return map(self._mapping._at, range(len(self._mapping)))


def files_of(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The files that hold `tensors`."""
    files = getattr(tensors, "files", None)
    return {info.file for info in tensors.values()} if files is None else set(files)


def table_of(infos: Iterable[TensorInfo]) -> TensorTable:
    """The table of these tensors, which must have distinct names; those of one file must be consecutive."""
    types: dict[TensorType, int] = {}
    table = TensorTable([], [], [], array("q"), array("q"), [], [])
    for row, info in enumerate(infos):
        if not table.files or table.files[-1] != info.file:
            table.files.append(info.file)
            table.firsts.append(row)
        table.names.append(info.name)
        table.kinds.append(types.setdefault(info.type, len(types)))
        table.starts.append(info.start)
        table.ends.append(info.end)
    table.types = list(types)
    table.__post_init__()
    return table


def joined(tables: Iterable[TensorTable]) -> TensorTable:
    """One table of the rows of all tables; `TensorTable.repeated` reports a duplicate name."""
    types: dict[TensorType, int] = {}
    whole = TensorTable([], [], [], array("q"), array("q"), [], [])
    for table in tables:
        type_indices = [types.setdefault(kind, len(types)) for kind in table.types]
        whole.files += table.files
        whole.firsts += [len(whole.names) + first for first in table.firsts]
        whole.names += table.names
        whole.kinds += map(type_indices.__getitem__, table.kinds)
        whole.starts += table.starts
        whole.ends += table.ends
    whole.types = list(types)
    whole.__post_init__()
    return whole
