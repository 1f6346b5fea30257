"""Records to JSON and to table rows, and back."""

from __future__ import annotations

import doctest
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from moectl.errors import CheckpointError, UsageError
from moectl.files import records
from moectl.files.records import from_cells, from_json, to_cells, to_json
from moectl.files.tensor_table import TensorType


@dataclass(frozen=True)
class Inner:
    count: int
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    pair: tuple[int, str]
    many: tuple[Inner, ...] = ()
    tags: frozenset[str] = frozenset()
    named: Mapping[str, Inner] = field(default_factory=dict)
    note: str | None = None
    flag: bool = False
    any: Any = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a record needs a name")


FULL = Outer("x", Inner(1), (2, "y"), (Inner(3, 4.0),), frozenset("ba"), {"k": Inner(5)}, "n", True, [1])
SMALL = {"name": "x", "inner": {"count": 1}, "pair": [2, "y"]}


def test_a_record_comes_back_from_its_document() -> None:
    document = to_json(FULL)
    assert list(document) == ["name", "inner", "pair", "many", "tags", "named", "note", "flag", "any"]
    assert document["tags"] == ["a", "b"] and document["pair"] == [2, "y"]
    assert from_json(Outer, json.loads(json.dumps(document)), "here") == FULL
    assert from_json(Outer, SMALL, "here") == Outer("x", Inner(1), (2, "y"))


def test_a_whole_number_stands_for_a_float_and_stays_one() -> None:
    inner = from_json(Inner, {"count": 1, "share": 2}, "here")
    assert json.dumps(to_json(inner)) == '{"count": 1, "share": 2}'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner": 3}, "here.inner must be an object, got int '3'"),
        ({"inner": {}}, "here.inner is incomplete: it lacks count"),
        ({"inner": {"count": 1, "b": 2, "a": 3}}, "here.inner has unknown fields a, b"),
        ({"inner": {"b": 2}}, "here.inner is incomplete: it lacks count and has unknown fields b"),
        ({"inner": {"count": True}}, "here.inner.count must be of type int, got bool 'True'"),
        ({"inner": {"count": 1.0}}, "here.inner.count must be of type int, got float '1.0'"),
        ({"inner": {"count": 1, "share": "1"}}, "here.inner.share must be of type float, got str '1'"),
        ({"inner": {"count": 1, "share": True}}, "here.inner.share must be of type float, got bool 'True'"),
        ({"inner": {"count": 1, "share": 10**400}}, "here.inner.share must be of type float, got int '1000"),
        ({"pair": [1]}, r"here.pair must be a list of 2, got list '\[1\]'"),
        ({"pair": "1y"}, "here.pair must be a list, got str '1y'"),
        ({"pair": [1, 2]}, r"here.pair\[1\] must be of type str, got int '2'"),
        ({"many": [{"count": None}]}, r"here.many\[0\].count must be of type int, got NoneType 'None'"),
        ({"tags": ["a", 1]}, r"here.tags\[1\] must be of type str, got int '1'"),
        ({"named": {"k": 1}}, "here.named.k must be an object, got int '1'"),
        ({"named": [1]}, "here.named must be an object, got list"),
        ({"note": 1}, "here.note must be of type str, got int '1'"),
        ({"flag": 1}, "here.flag must be of type bool, got int '1'"),
        ({"name": ""}, "here is not valid: a record needs a name"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    for refusal in (CheckpointError, UsageError):
        with pytest.raises(refusal, match=words):
            from_json(Outer, SMALL | change, "here", refusal)


def test_a_named_tuple_is_a_record() -> None:
    kind = TensorType("BF16", (2, 3))
    assert to_json({"w": kind}) == {"w": {"dtype": "BF16", "shape": [2, 3]}}
    assert from_json(TensorType, to_json(kind), "w") == kind
    with pytest.raises(CheckpointError, match="w is incomplete: it lacks shape"):
        from_json(TensorType, {"dtype": "BF16"}, "w")
    with pytest.raises(CheckpointError, match="w must be an object, got list"):
        from_json(TensorType, ["BF16", [2, 3]], "w")


@dataclass(frozen=True)
class Spent:
    seconds: float | None = None


@dataclass(frozen=True)
class Line:
    name: str
    count: int
    spent: Spent = field(default_factory=Spent)
    share: float | None = None
    flag: bool | None = None


LINE = Line("x", 3, Spent(4.5), 0.25, True)


def test_a_row_is_flat_and_comes_back_from_json_and_from_texts() -> None:
    cells = to_cells(LINE)
    assert list(cells.items()) == [
        ("name", "x"),
        ("count", 3),
        ("share", 0.25),
        ("flag", True),
        ("seconds", 4.5),
    ]
    texts = {name: str(value) for name, value in cells.items()}
    for row in (cells, texts, texts | {"of": "nobody"}, cells | {"count": 3.0}):
        assert from_cells(Line, row, "line 1", "line") == LINE
    assert from_cells(Line, {"name": "", "count": "3", "share": "", "flag": None}, "", "line") == Line("", 3)
    assert to_cells(Line("x", 3, Spent(float("inf")), float("nan"))) == to_cells(Line("x", 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": ""}, "line 1: count must not be ''"),
        ({"count": "many"}, "count must not be 'many'"),
        ({"count": 1.5}, "count must not be 1.5"),
        ({"count": True}, "count must not be True"),
        ({"count": "9e999"}, "count must not be '9e999'"),
        ({"share": 10**400}, "share must not be 1000"),
        ({"share": "nan"}, "share must not be 'nan'"),
        ({"flag": 3}, "flag must not be 3"),
        ({"name": 5}, "name must not be 5"),
        ({"seconds": []}, r"seconds must not be \[\]"),
    ],
)
def test_cells_of_other_types_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_cells(Line, to_cells(LINE) | change, "line 1", "line", UsageError)


def test_a_row_that_lacks_cells_says_which() -> None:
    with pytest.raises(CheckpointError, match="line 1 is no line of a test: it lacks count, name"):
        from_cells(Line, {"flag": ""}, "line 1", "line of a test")


def test_examples_of_docstrings() -> None:
    assert doctest.testmod(records).attempted and not doctest.testmod(records).failed
