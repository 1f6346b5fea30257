"""Safetensors headers: what the safetensors library refuses is refused, and what both accept is the same."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .changes import CONSTANTS, HOSTILE, as_text, changed_bytes, changed_value
from .outcomes import WrongAnswerError, function
from .search import Reader

LARGEST_DATA = 1 << 16
"""Most bytes of data that a made file has."""

_SIZES = (0, 0, 1, 2, 3, 4, 7, 8, 16)
_HUGE = (1 << 15, 1 << 31, 1 << 32, 1 << 33, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)


def packed(text: bytes, data: bytes | int) -> bytes:
    """The safetensors file of a header's text and its data, or so many bytes of zeros."""
    return len(text).to_bytes(8, "little") + text + (bytes(data) if isinstance(data, int) else data)


def unpacked(file: bytes) -> tuple[bytes, bytes]:
    """The text of a file's header, and its data."""
    end = 8 + int.from_bytes(file[:8], "little")
    return file[8:end], file[end:]


def split_header(file: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The text of a file's header, and what makes a file with the same data of another text."""
    text, data = unpacked(file)
    return text, lambda changed: packed(changed, data)


def made_header(dice: random.Random) -> dict[str, Any]:
    """A valid header of a few tensors, or one that is wrong in its numbers alone."""
    from moectl.dtypes import DTYPE_BITS

    header: dict[str, Any] = {}
    if dice.random() < 0.3:
        header["__metadata__"] = {"format": "pt", "k": dice.choice(("v", *HOSTILE[:4]))}
    start = 0
    for number in range(dice.choice((0, 1, 1, 2, 3, 5))):
        dtype = dice.choice(list(DTYPE_BITS))
        shape = [dice.choice(_SIZES) for _ in range(dice.choice((0, 1, 2, 2, 3)))]
        if dice.random() < 0.2:
            shape.insert(dice.randrange(len(shape) + 1), dice.choice(_HUGE))
        count = 1
        for size in shape:
            count *= size
        nbytes = min(-(-count * DTYPE_BITS[dtype] // 8), LARGEST_DATA)
        name = f"t{number}" if dice.random() < 0.9 else dice.choice(("w", "w\u00e9", *HOSTILE[:8]))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + nbytes]}
        start += nbytes
    return header


def _end_of(text: bytes) -> int:
    """The largest number in the header's text that can be the end of the data."""
    ends = [int(found) for found in re.findall(rb"\d{1,6}(?=\])", text)]
    return max((end for end in ends if end <= 4 * LARGEST_DATA), default=0)


def changed_header(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A file with a header: a new or a known one, changed in its structure, its numbers or its bytes."""
    if dice.random() < 0.3:
        text, data = unpacked(dice.choice(seeds))
        header = json.loads(text)
    else:
        header, data = made_header(dice), b""
    choice = dice.randrange(10)
    if choice < 4:
        header = changed_value(dice, header)
    elif choice == 4 and len(header) > 1:
        entries = list(header.items())
        dice.shuffle(entries)
        header = dict(entries)
    text = as_text(dice, header)
    if choice in (5, 6):
        text = _respelled(dice, text)
    elif choice == 7:
        text = changed_bytes(dice, text)
    elif choice == 8:
        text = dice.choice((b" ", b"\n", b"\0", b"")) * dice.randrange(9) + text + b" " * dice.randrange(9)
    size = max(0, (len(data) or _end_of(text)) + dice.choice((0,) * 12 + (-1, 1, 8)))
    file = packed(text, data[:size].ljust(size, b"\0"))
    return changed_bytes(dice, file) if dice.random() < 0.03 else file


def _respelled(dice: random.Random, text: bytes) -> bytes:
    """A number, a word or a character of the text in another spelling."""
    numbers = list(re.finditer(rb"\d+", text))
    if numbers and dice.random() < 0.7:
        found = dice.choice(numbers)
        value = found[0].decode()
        other = dice.choice(
            (f"-{value}", f"0{value}", f"+{value}", f"{value}.0", f"{value}e0", f"{value}E+0", *CONSTANTS,
             *map(str, _HUGE), "true", "null", f'"{value}"', f"[{value}]", "\u0663")
        )  # fmt: skip
        return text[: found.start()] + other.encode() + text[found.end() :]
    place = dice.randrange(len(text) + 1)
    pieces = (
        b"\\u0041",
        b"\\ud83d",
        b"\x00",
        b"\x7f",
        b"\x0b",
        b"\xc2\x85",
        b"\xef\xbb\xbf",
        b",",
        b"//",
        b"'",
    )
    return text[:place] + dice.choice(pieces) + text[place + dice.randrange(2) :]


def read_both(file: bytes) -> str:
    """What moectl says of a file's header; WrongAnswerError if the safetensors library knows better."""
    import safetensors

    from moectl.errors import CheckpointError
    from moectl.files.safetensors_header import read_header

    try:
        ours = read_header(file, len(file), "x.safetensors")
    except CheckpointError as error:
        return str(error)
    deserialize: Any = safetensors.deserialize
    try:
        listed = deserialize(file)
    except (safetensors.SafetensorError, ValueError) as error:
        said = str(error).removeprefix("Error while deserializing: ")
        reason = re.sub(r"`.*?`|\".*?\"|\d+", "", said.rpartition("header: ")[2]).replace(":", "")
        raise WrongAnswerError(f"safetensors says {reason}: {said}") from None
    theirs = {name: (form["dtype"], list(form["shape"]), bytes(form["data"])) for name, form in listed}
    mine = {info.name: (info.dtype, list(info.shape), file[info.start : info.end]) for info in ours.values()}
    if theirs.keys() != mine.keys():
        raise WrongAnswerError(f"other names: {sorted(mine.keys() ^ theirs.keys())}")
    for name, form in mine.items():
        if form != theirs[name]:
            raise WrongAnswerError(f"another tensor: {form} and {theirs[name]}")
    return "\n".join(ours) if all(name.isprintable() for name in ours) else "\x00"


def header_seeds() -> list[bytes]:
    """Small files as writers write them, and in spellings that few writers use."""
    plain = {
        "__metadata__": {"format": "pt"},
        "model.layers.0.mlp.experts.gate_up_proj_blocks": {
            "dtype": "U8", "shape": [2, 4, 1, 16], "data_offsets": [0, 128],
        },
        "model.layers.0.mlp.router.weight": {"dtype": "BF16", "shape": [2, 8], "data_offsets": [128, 160]},
        "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [160, 160]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [160, 164]},
    }  # fmt: skip
    compact = json.dumps(plain, separators=(",", ":")).encode()
    fp4 = b'{"a":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}}'
    return [
        packed(compact, 164),
        packed(compact + b"    ", 164),
        packed(json.dumps(plain, indent=1).encode(), 164),
        packed(fp4, 2),
        packed(b'{"__metadata__":{"a":"b"}}', 0),
        packed(b"{}", 0),
    ]


def header_readers(work: Path) -> Iterator[Reader]:
    """The reader of headers, beside the safetensors library; and of other files of tensors."""
    seeds = header_seeds()
    yield Reader("headers", seeds, read_both, share=880, change=changed_header, split=split_header)
    yield from _tensor_files(work, seeds)


def _tensor_files(work: Path, seeds: Sequence[bytes]) -> Iterator[Reader]:
    """Files of tensors that users give: inputs, activations for calibration, traces, dumps of parameters."""
    from moectl.bench.routings import read_trace
    from moectl.convert.quantize.calibration import Calibration
    from moectl.parity.compare_parameters import compared
    from moectl.parity.parameter_dump import PLACES
    from moectl.parity.parameter_sets import dumped
    from moectl.problem.published_layers import named_problem
    from moectl.run.workload import load_tensors

    _, problem = named_problem("gpt-oss-20b")
    path = work / "given.safetensors"
    places = json.dumps({"w": [[4, 1], 0]})
    dump = {
        "__metadata__": {PLACES: places, "format": "pt"},
        "w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    }
    trace = {
        "ids": {"dtype": "I64", "shape": [2, 4], "data_offsets": [0, 64]},
        "weights": {"dtype": "F32", "shape": [2, 4], "data_offsets": [64, 96]},
    }
    activations = {"x": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}

    def file(header: dict[str, Any], size: int) -> bytes:
        return packed(json.dumps(header).encode(), size)

    def calibrate() -> None:
        calibration = Calibration(path)
        if not calibration.shared(0):
            return
        calibration.check(0, 2, 8)

    def compare() -> None:
        found = dumped(path)
        compared(found, found)

    for name, good, call in (
        ("run --input", file(trace, 96), lambda: load_tensors(path, "the input")),
        ("bench --routing", file(trace, 96), lambda: read_trace(path, problem)),
        ("convert --calibration", file(activations, 128), calibrate),
        ("parity", file(dump, 32), compare),
    ):

        def read(data: bytes, call: Any = call) -> str:
            path.write_bytes(data)
            return function(call)

        yield Reader(
            f"tensors, {name}",
            [*[good] * len(seeds), *seeds],
            read,
            share=6,
            change=changed_header,
            split=split_header,
        )
