"""`scripts/break_readers` changes every kind of input, and knows a wrong answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from devtools.breaking import outcomes
from devtools.breaking.changes import changed_document, with_hostile_fields
from devtools.breaking.headers import header_readers, packed, read_both
from devtools.breaking.outcomes import WrongAnswerError, defect_of
from devtools.breaking.search import Reader, Search, shares

from moectl.errors import CheckpointError
from moectl.files import safetensors_header
from support.scripts import loaded

CASES = 2000
"""Cases of all readers that run with the other tests; by their shares most are headers."""

SEED = 11


def test_changes_of_every_kind_of_input_find_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = loaded("break_readers")
    for name, value in script.own_caches(tmp_path).items():
        monkeypatch.setenv(name, value)
    search = Search(SEED)
    readers = list(script.all_readers(tmp_path))
    for reader, number in shares(readers, CASES):
        search.case(reader, number)
    assert set(search.cases) == {reader.name for reader in readers}
    assert len(readers) > 60 and search.cases.total() > CASES - len(readers)
    assert not search.found, search.to_json()["defects"]


def test_headers_of_many_kinds_find_nothing_wrong(tmp_path: Path) -> None:
    (headers, *_) = header_readers(tmp_path)
    search = Search(SEED)
    search.unchanged(headers)
    for number in range(8000):
        search.case(headers, number)
    assert not search.found, search.to_json()["defects"]


def test_a_header_that_safetensors_refuses_is_a_defect_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(raw: bytes, name: str) -> None:
        pass

    text = b'{"t": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}, "u": %s}' % (
        b'{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
    )
    assert "the number '-0'" in read_both(packed(text, 4))
    monkeypatch.setattr(safetensors_header, "_refuse_odd_numbers", careless)
    with pytest.raises(WrongAnswerError, match="safetensors says"):
        read_both(packed(text, 4))
    (headers, *_) = header_readers(Path())
    found = Search(0).given(headers, "a case", packed(text, 4))
    assert found is not None and found.count == 1
    assert b"-0" in found.data and len(found.data) < len(packed(text, 4))


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda: "plain \u00b5s\n", ""),
        (lambda: "a\x1b[0m", "raw characters"),
        (lambda: "a\u202eb\x85", "raw characters"),
        (lambda: 1 / 0, "ZeroDivisionError test_break_readers.py:"),
        (lambda: [][1], "IndexError"),
        (lambda: outcomes.function(lambda: 1 / 0), "ZeroDivisionError"),
        (lambda: outcomes.function(lambda: int("x")), "ValueError"),
    ],
)
def test_a_wrong_answer_is_a_defect(read: Callable[[], str], kind: str) -> None:
    defect = defect_of(read)
    assert defect.kind.startswith(kind) if defect is not None else kind == ""


def test_an_answer_that_never_comes_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> str:
        while True:
            pass

    monkeypatch.setattr(outcomes, "WAITING", 0.2)
    defect = defect_of(wait)
    assert defect is not None and defect.kind == "time"


def test_an_answer_that_takes_memory_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter((100.0, 1200.0))
    monkeypatch.setattr(outcomes, "_peak_megabytes", lambda: next(peaks))
    defect = defect_of(str)
    assert defect is not None and defect.words == "took 1100 MB"


def test_moectls_own_errors_are_no_defects() -> None:
    def refuse() -> None:
        raise CheckpointError("x is damaged.", hint="Fetch it again.")

    assert outcomes.function(refuse) == "x is damaged. Fetch it again."


def test_changes_are_many_and_the_same_for_one_seed() -> None:
    seeds = [b'{"rows": [{"us": 1.5, "name": "x"}], "n": 3}', b'{"other": {"key": [1, 2]}}']
    made = [changed_document(random.Random(number), seeds) for number in range(400)]
    assert made == [changed_document(random.Random(number), seeds) for number in range(400)]
    assert len(set(made)) > 250
    for part in (b"NaN", b"[[[[", b"\\ud800", b"\\u202e", b"unknown", b"e+308"):
        assert any(part in data for data in made), part
    assert any(b"rows" in data and b"other" in data for data in made)


def test_hostile_text_in_every_field() -> None:
    changed = list(with_hostile_fields(b'{"a": "x", "b": [{"c": "y"}, {"c": "z"}], "d": 1}', lines=False))
    assert len(changed) == 2 and all(b"\\u202e" in data for data in changed)


def test_a_defect_is_counted_once_by_kind_and_made_small() -> None:
    def read(data: bytes) -> str:
        if b"7" in data:
            raise KeyError("seven")
        return ""

    reader = Reader("sevens", [b'{"a": 1, "b": [7, 2], "c": {"d": 3}}'], read)
    search = Search(3)
    first = search.given(reader, "first", reader.seeds[0])
    assert first is not None and first.data == b"7"
    assert search.given(reader, "second", reader.seeds[0]) is None and first.count == 2
    assert [defect["count"] for defect in search.to_json()["defects"]] == [2]
    with pytest.raises(AssertionError, match="unchanged"):
        search.unchanged(reader)


def test_shares_of_cases() -> None:
    often, seldom = (Reader(name, [b"{}"], bytes.decode, share) for name, share in (("a", 9), ("b", 1)))
    counted = [reader.name for reader, _ in shares((often, seldom), 100)]
    assert (counted.count("a"), counted.count("b")) == (90, 10)
