"""JSON from untrusted files: the quick way agrees with the one that looks at every pair."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moectl.errors import CheckpointError
from moectl.files import strict_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), values, max_size=5), st.booleans())
def test_both_ways_agree(document: dict[str, Any], ascii_only: bool) -> None:
    data = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    found = strict_json._parse_plain(data)
    assert found is None or found == strict_json._parse_any(data, "it") == document
    if b"\\" not in data:
        assert found is not None


@given(st.text(alphabet='{}[]:,"a1 ', max_size=24))
def test_the_quick_way_accepts_nothing_else(text: str) -> None:
    data = text.encode()
    found = strict_json._parse_plain(data)
    assert found is None or found == strict_json._parse_any(data, "it")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 1}',
        '{"a": {"b": "x", "b": "x"}}',
        '{"a": [{"b": {}, "b": {}}]}',
        '{"a": "b", "c": ["d"], "a": "e"}',
    ],
)
def test_repeats_are_left_to_the_slow_way(text: str) -> None:
    assert strict_json._parse_plain(text.encode()) is None
    with pytest.raises(CheckpointError, match="occurs twice"):
        strict_json.parse_json_object(text.encode(), "it")


@pytest.mark.parametrize("depth", [100, 400, 700, 950, 5000, 100_000])
def test_depth(depth: int) -> None:
    data = b'{"a":' * depth + b"1" + b"}" * depth
    try:
        found = strict_json.parse_json_object(data, "it")
    except CheckpointError as error:
        assert "deep" in str(error)
    else:
        assert depth < 1000
        assert set(found) == {"a"}
