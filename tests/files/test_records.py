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
from moectl.files.record_schemas import record_schema
from moectl.files.records import (
    Above0,
    Count,
    From0,
    Size,
    extensible,
    from_cells,
    from_json,
    to_cells,
    to_json,
)
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
        ({"inner": 3}, "here.inner must be an object, got the number 3"),
        ({"inner": {}}, "here.inner is incomplete: it lacks count"),
        ({"inner": {"count": 1, "b": 2, "a": 3}}, "here.inner has unknown fields a, b"),
        ({"inner": {"b": 2}}, "here.inner is incomplete: it lacks count and has unknown fields b"),
        ({"inner": {"count": True}}, "here.inner.count must be a whole number, got true"),
        ({"inner": {"count": 1.0}}, "here.inner.count must be a whole number, got the number 1.0"),
        ({"inner": {"count": 1, "share": "1"}}, "here.inner.share must be a number, got the string '1'"),
        ({"inner": {"count": 1, "share": True}}, "here.inner.share must be a number, got true"),
        ({"inner": {"count": 1, "share": 10**400}}, "here.inner.share must be a number, got the number 1000"),
        ({"pair": [1]}, r"here.pair must be a list of 2, got a list"),
        ({"pair": "1y"}, "here.pair must be a list, got the string '1y'"),
        ({"pair": [1, 2]}, r"here.pair\[1\] must be a string, got the number 2"),
        ({"many": [{"count": None}]}, r"here.many\[0\].count must be a whole number, got null"),
        ({"tags": ["a", 1]}, r"here.tags\[1\] must be a string, got the number 1"),
        ({"named": {"k": 1}}, "here.named.k must be an object, got the number 1"),
        ({"named": [1]}, "here.named must be an object, got a list"),
        ({"note": 1}, "here.note must be a string, got the number 1"),
        ({"flag": 1}, "here.flag must be true or false, got the number 1"),
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
    with pytest.raises(CheckpointError, match="w must be an object, got a list"):
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
    for row in (texts, texts | {"of": "nobody"}):
        assert from_cells(Line, row, "line 1", "line", text=True) == LINE
    assert from_cells(Line, cells | {"of": "nobody"}, "line 1", "line") == LINE
    empty = {"name": "", "count": "3", "share": "", "flag": None}
    assert from_cells(Line, empty, "", "line", text=True) == Line("", 3)
    assert to_cells(Line("x", 3, Spent(float("inf")), float("nan"))) == to_cells(Line("x", 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": "3"}, "line 1: count must be a whole number, got the string '3'"),
        ({"count": 1.5}, "count must be a whole number, got the number 1.5"),
        ({"count": 3.0}, "count must be a whole number, got the number 3.0"),
        ({"count": True}, "count must be a whole number, got true"),
        ({"share": 10**400}, "share must be a number, got the number 1000"),
        ({"flag": 3}, "flag must be true or false, got the number 3"),
        ({"name": 5}, "name must be a string, got the number 5"),
        ({"seconds": []}, "seconds must be a number, got a list"),
    ],
)
def test_cells_of_other_types_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_cells(Line, to_cells(LINE) | change, "line 1", "line", UsageError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": ""}, "line 1: count must not be ''"),
        ({"count": "many"}, "count must not be 'many'"),
        ({"count": "1.5"}, "count must not be '1.5'"),
        ({"count": "\uff13"}, "count must not be '\uff13'"),
        ({"count": "1_0"}, "count must not be '1_0'"),
        ({"count": "9e999"}, "count must not be '9e999'"),
        ({"count": "9" * 5000}, "count must not be '999"),
        ({"share": "nan"}, "share must not be 'nan'"),
        ({"flag": "3"}, "flag must not be '3'"),
    ],
)
def test_texts_of_other_types_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_cells(Line, {"name": "x", "count": "3"} | change, "line 1", "line", UsageError, text=True)


@dataclass(frozen=True)
class Ranged:
    size: Size
    count: Count
    us: Above0 | None = None
    tried: Mapping[int, From0] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": -1}, "it: size must be at least 0, got -1"),
        ({"count": 0}, "it: count must be at least 1, got 0"),
        ({"us": 0}, "it: us must be above 0, got 0"),
        ({"us": float("nan")}, "it: us must be above 0, got nan"),
        ({"tried": {"8": -0.5}}, "it: tried.8 must be at least 0, got -0.5"),
        ({"tried": {"x": 0.5}}, "it: tried must have whole numbers as keys, got 'x'"),
        ({"tried": {"\u00b2": 0.5}}, "it: tried must have whole numbers as keys"),
    ],
)
def test_numbers_have_ranges_which_schemas_tell(change: dict[str, Any], words: str) -> None:
    found = from_json(Ranged, {"size": 0, "count": 1, "us": None, "tried": {"8": 0}}, "it: ")
    assert found == Ranged(0, 1, None, {8: 0})
    with pytest.raises(CheckpointError, match=words):
        from_json(Ranged, {"size": 0, "count": 1} | change, "it: ")
    properties = record_schema(Ranged)["properties"]
    assert properties["size"] == {"type": "integer", "minimum": 0}
    assert properties["us"] == {"type": ["number", "null"], "exclusiveMinimum": 0}


@extensible
@dataclass(frozen=True)
class Published:
    name: str
    gate: str | Inner = ""


def test_later_fields_of_a_published_document_are_ignored_and_its_types_may_be_several() -> None:
    assert from_json(Published, {"name": "x", "later": [1]}, "it: ") == Published("x")
    assert from_json(Published, {"name": "x", "gate": {"count": 1}}, "it: ").gate == Inner(1)
    with pytest.raises(CheckpointError, match="it: gate must be an object, got the number 1"):
        from_json(Published, {"name": "x", "gate": 1}, "it: ")


def test_messages_name_a_few_of_many_fields() -> None:
    data = {"count": 1} | {f"field{number:05}": 1 for number in range(1000)} | {"z" * 5000: 1}
    with pytest.raises(CheckpointError, match="and 993 more") as refused:
        from_json(Inner, data, "it: ")
    assert len(str(refused.value)) < 300


def test_a_row_that_lacks_cells_says_which() -> None:
    with pytest.raises(CheckpointError, match="line 1 is no line of a test: it lacks count, name"):
        from_cells(Line, {"flag": ""}, "line 1", "line of a test", text=True)


def test_examples_of_docstrings() -> None:
    assert doctest.testmod(records).attempted and not doctest.testmod(records).failed
