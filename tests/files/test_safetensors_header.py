"""The safetensors header parser believes nothing that cannot be true."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moectl.checkpoint import TensorInfo, read_header
from moectl.dtypes import DTYPE_BITS
from moectl.errors import CheckpointError, ExitCode
from moectl.files import safetensors_header as header_module
from moectl.files.safetensors_header import HEADER_LIMIT, Budget
from moectl.files.tensor_table import TensorTable


def spelled(header: dict[str, Any]) -> bytes:
    """A header as writers spell it, without spaces."""
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def packed(header: bytes | dict[str, Any], data: int = 0, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else spelled(header)
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data)


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(content: bytes, *words: str, size: int | None = None) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_header(content, len(content) if size is None else size, "w.safetensors")
    assert caught.value.exit_code is ExitCode.BAD_CHECKPOINT
    for word in ("w.safetensors", *words):
        assert word in str(caught.value)


def test_sound_header() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [2, 3], [4, 16]),
        "a": entry(),
        "empty": entry("F32", [0, 7], [16, 16]),
        "scalar": entry("F32", [], [16, 20]),
    }
    content = packed(header, 20)
    base = len(content) - 20
    expected = {
        "b": TensorInfo("b", "BF16", (2, 3), "w.safetensors", base + 4, base + 16),
        "a": TensorInfo("a", "U8", (4,), "w.safetensors", base, base + 4),
        "empty": TensorInfo("empty", "F32", (0, 7), "w.safetensors", base + 16, base + 16),
        "scalar": TensorInfo("scalar", "F32", (), "w.safetensors", base + 16, base + 20),
    }
    assert read_header(content, len(content), "w.safetensors") == expected
    assert read_header(io.BytesIO(content), len(content), "w.safetensors") == expected
    # A range request gets the header alone, not the data.
    assert read_header(content[:base], len(content), "w.safetensors") == expected


@pytest.mark.parametrize("cut", [0, 7, 8, 20, -4])
def test_truncated(cut: int) -> None:
    content = packed({"a": entry()}, 4)
    refused(content[:cut], "truncated")


def test_data_truncated_names_the_tensor() -> None:
    content = packed({"a": entry(), "last": entry(offsets=[4, 8])}, 8)
    refused(content[:-1], "'last'", "inside the file")


@pytest.mark.parametrize("length", [0, 1, 1 << 60, (1 << 64) - 1, HEADER_LIMIT + 1])
def test_absurd_length(length: int) -> None:
    refused(packed({"a": entry()}, 4, length), str(length))


def test_length_past_the_end() -> None:
    refused(packed({"a": entry()}, 4, 10_000), "truncated", "10008")


def test_source_shorter_than_said() -> None:
    content = packed({"a": entry()}, 4)
    refused(content[:20], "truncated", size=len(content))


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b'{"a\xff": 1}', "UTF-8"),
        (b'{"a": ', "JSON"),
        (b"[1, 2]", "object"),
        (b"12", "object"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deep"),
        (b'{"a": ' + b"1" * 5000 + b"}", "JSON"),
        (b'{"a": {}, "a": {}}', "'a' occurs twice"),
        (b'{"a": {"dtype": "U8", "dtype": "I8"}}', "'dtype' occurs twice"),
        (b'{"a": 3}', "object"),
        (b'{"": {}}', "name"),
        (b'{"' + b"x" * 2000 + b'": {}}', "name"),
        (b'{"__metadata__": {"format": 1}}', "__metadata__"),
        (b'{"__metadata__": []}', "__metadata__"),
        (b'{"\\ud800": {}}', "lone surrogate"),
        (b'{"__metadata__": {"a": "\\uDC00"}}', "lone surrogate"),
        (b'{"a\\nb": {}}', "printable"),
        (b'{"a\\u0000": {}}', "printable"),
        (b'{"a\xc2\x85": {}}', "printable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_json(raw: bytes, word: str) -> None:
    refused(packed(raw), word)


@pytest.mark.parametrize("shape", [None, 4, "4", [True, 4], [[4]], ["4"], [1 << 63], [1] * 33])
def test_bad_shape(shape: Any) -> None:
    refused(packed({"t": entry(shape=shape)}, 4), "'t'", "shape")


@pytest.mark.parametrize("offsets", [None, [0], [0, 4, 4], [False, 4], ["0", 4], {"0": 4}])
def test_bad_offsets(offsets: Any) -> None:
    refused(packed({"t": entry(offsets=offsets)}, 4), "'t'", "offsets")


@pytest.mark.parametrize(
    "numbers", [{"shape": [-4]}, {"shape": [4.0]}, {"offsets": [0, 4.0]}, {"offsets": [-1, 3]}]
)
def test_bad_numbers(numbers: dict[str, list[float]]) -> None:
    refused(packed({"t": entry(**numbers)}, 4), "the header has the number", "expected whole ones")


@pytest.mark.parametrize("offsets", [[4, 0], [0, 5], [0, 1 << 62]])
def test_offsets_outside(offsets: list[int]) -> None:
    refused(packed({"t": entry(offsets=offsets)}, 4), "'t'", "inside")


@pytest.mark.parametrize("dtype", [None, 8, "u8", "F8", "BF17", ["U8"], {}])
def test_unknown_dtype(dtype: Any) -> None:
    refused(packed({"t": entry(dtype)}, 4), "'t'", "dtype")


def test_size_does_not_match() -> None:
    refused(packed({"t": entry("BF16", [3], [0, 4])}, 4), "'t'", "6 bytes", "4 bytes")
    refused(packed({"t": entry("U8", [1 << 62] * 32, [0, 4])}, 4), "'t'")


@pytest.mark.parametrize(
    "shape", [[1 << 62, 4, 0], [0, 1 << 62, 2], [1 << 60, 0], [0, (1 << 63) - 1, (1 << 63) - 1]]
)
def test_sizes_that_overflow_beside_zero(shape: list[int]) -> None:
    refused(packed({"t": entry("F32", shape, [0, 0])}), "'t'", "does not fit into 64 bits")


@pytest.mark.parametrize("number", ["-0", "1e999", "NaN", "-Infinity", "1.5", "9" * 400, "-3"])
@pytest.mark.parametrize("space", ["", " "])
def test_numbers_that_are_no_sizes(number: str, space: str) -> None:
    tensor = '{"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":' + f"{space}{number}" + "}}"
    refused(packed(tensor.encode()), "the number", number[:20])


def test_a_name_may_look_like_such_a_number() -> None:
    content = packed({"a": entry(), "b ,-0": entry("U8", [0], [4, 4]), "b: 1e9": entry("U8", [0], [4, 4])}, 4)
    spaced = packed(json.dumps(json.loads(content[8:-4])).encode(), 4)
    assert list(read_header(spaced, len(spaced), "w")) == ["a", "b ,-0", "b: 1e9"]


def test_odd_count_of_four_bit_values() -> None:
    refused(packed({"t": entry("F4", [7], [0, 4])}, 4), "'t'")
    content = packed({"t": entry("F4", [8], [0, 4])}, 4)
    assert read_header(content, len(content), "x")


def test_overlap_names_both() -> None:
    refused(packed({"one": entry(), "two": entry(offsets=[2, 6])}, 6), "'one'", "'two'", "overlap")
    refused(packed({"one": entry(), "same": entry()}, 4), "'one'", "'same'", "overlap")


def test_gap_and_tail() -> None:
    refused(packed({"one": entry(), "two": entry(offsets=[5, 9])}, 9), "'two'", "no tensor")
    refused(packed({"one": entry()}, 6), "'one'")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4\n"


@pytest.mark.parametrize("source", [LFS, io.BytesIO(LFS)], ids=["bytes", "file"])
def test_git_lfs_pointer(source: Any) -> None:
    with pytest.raises(CheckpointError, match=r"w\.safetensors is a Git LFS pointer") as caught:
        read_header(source, len(LFS), "w.safetensors")
    assert "git lfs pull" in caught.value.hint


def test_names_in_any_script() -> None:
    content = packed({"b\U0001f600": entry()}, 4)
    assert list(read_header(content, len(content), "w")) == ["b\U0001f600"]


def empty_tensors(count: int) -> bytes:
    return packed({f"t{at}": entry(shape=[0], offsets=[0, 0]) for at in range(count)})


def test_flood_of_empty_tensors_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "EMPTY_LIMIT", 50)
    read_header(empty_tensors(50), len(empty_tensors(50)), "w.safetensors")
    monkeypatch.setattr(header_module, "parse_json_object", None)
    refused(empty_tensors(60), "at most 50 tensors")


@pytest.mark.parametrize(
    "raw", [b'{"a":{' + b'"b":{},' * 99 + b'"c":{}}}', b'{"a":[' + b"[]," * 99 + b"[]]}"]
)
def test_flood_of_objects_is_not_parsed(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "TENSOR_LIMIT", 40)
    monkeypatch.setattr(header_module, "parse_json_object", None)
    refused(packed(raw, 1000), "at most 40 tensors")


@pytest.mark.parametrize(
    ("limit", "value", "word"),
    [
        ("EMPTY_LIMIT", 15, "20 tensors without data"),
        ("TENSOR_LIMIT", 15, "20 tensors"),
        ("TOTAL_HEADER_LIMIT", 1000, "bytes of headers"),
    ],
)
def test_files_share_a_budget(limit: str, value: int, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, limit, value)
    content, budget = empty_tensors(10), Budget()
    read_header(content, len(content), "one.safetensors", budget)
    with pytest.raises(CheckpointError, match=rf"two\.safetensors.*{word}"):
        read_header(content, len(content), "two.safetensors", budget)
    read_header(content, len(content), "alone.safetensors")


def test_control_characters_are_escaped() -> None:
    with pytest.raises(CheckpointError) as caught:
        content = packed({"\x1b[2J\n": entry("no")}, 4)
        read_header(content, len(content), "w.safetensors")
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.text(max_size=4),
        json_values
        | st.fixed_dictionaries(
            {"dtype": st.sampled_from([*DTYPE_BITS, "?"]), "shape": json_values, "data_offsets": json_values}
        ),
        max_size=4,
    ),
    st.integers(0, 64),
)
def test_any_header_is_read_or_refused(header: dict[str, Any], data: int) -> None:
    content = packed(header, data)
    try:
        found = read_header(content, len(content), "w.safetensors")
    except CheckpointError:
        return
    covered = sum(info.nbytes for info in found.values())
    assert covered == data


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        found = read_header(content, len(content), "w.safetensors")
    except CheckpointError:
        return
    assert all(info.end <= len(content) for info in found.values())


def slowly(raw: bytes, data: int) -> TensorTable | str:
    """What looking at the tensors one by one says of a header: the tensors, or the error."""
    try:
        return header_module._read_any(raw, "w", 8 + len(raw), 8 + len(raw) + data)
    except CheckpointError as error:
        return str(error)


def quickly(raw: bytes, data: int) -> TensorTable | None:
    return header_module._read_as_written(raw, "w", 8 + len(raw), 8 + len(raw) + data)


USUAL = {
    "__metadata__": {"format": "pt", "note": "a {}"},
    "layers.0.experts.1.w": entry("BF16", [2, 3], [0, 12]),
    "layers.0.experts.2.w": entry("BF16", [2, 3], [12, 24]),
    "b\U0001f600": entry("F32", [], [24, 28]),
    "empty": entry("U8", [0], [28, 28]),
}


def test_a_usual_header_is_read_by_columns() -> None:
    for header in (USUAL, {key: value for key, value in USUAL.items() if key != "__metadata__"}):
        raw = spelled(header) + b"   "
        found = quickly(raw, 28)
        assert found is not None
        assert found == slowly(raw, 28)
        assert list(found) == [key for key in header if key != "__metadata__"]
    swapped = {name: USUAL[name] for name in reversed(USUAL) if name != "__metadata__"}
    assert quickly(spelled(swapped), 28) == slowly(spelled(swapped), 28)


@given(st.data())
def test_columns_never_accept_what_is_wrong(draw: st.DataObject) -> None:
    """A usual header with a few characters changed: read alike by both ways, or not by columns."""
    text = spelled(USUAL).decode()
    for _ in range(draw.draw(st.integers(0, 3))):
        at = draw.draw(st.integers(0, len(text) - 1))
        piece = draw.draw(st.sampled_from(["", *'019",}{[\\w\x01: é']))
        text = text[:at] + piece + text[at + draw.draw(st.integers(0, 2)) :]
    raw, data = text.encode(), draw.draw(st.sampled_from([28, 27, 29, 0]))
    found = quickly(raw, data)
    assert found is None or found == slowly(raw, data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("12,24", "12,23"),
        ("[12,24]", "[11,24]"),
        ("[24,28]", "[24,29]"),
        ("experts.2", "experts.1"),
        ("F32", "F33"),
        ("[2,3]", "[2,4]"),
        ("[2,3]", "[02,3]"),
        ("[2,3]", "[2,,3]"),
        ("[0,12]", "[00,12]"),
        ("[24,28]", "[24,99999999999999999999]"),
        ("empty", "__metadata__"),
        ("empty", "\x85"),
        ("empty", "\\ud800"),
        ("empty", "x" * 2000),
        ("},", "}},"),
        ("},", "}"),
        ("a {}", "\\ud800"),
        ('{"format":"pt",', '{"format":1,'),
        ('{"format":"pt",', '{"note":"pt",'),
    ],
)
def test_what_columns_leave_to_the_slow_way(old: str, new: str) -> None:
    raw = spelled(USUAL).decode().replace(old, new).encode()
    assert quickly(raw, 28) is None
    assert isinstance(slowly(raw, 28), str)
    content = packed(raw, 28)
    with pytest.raises(CheckpointError):
        read_header(content, len(content), "w")
