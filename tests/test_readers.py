"""Nothing reads files but through `files/safe_reading.py` and `files/folder_handle.py`, or is listed here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import moectl

PACKAGE = Path(moectl.__file__).parent

SEAMS = {"files/safe_reading.py", "files/folder_handle.py"}
"""The modules that open files for reading: regular ones, of bounded size, or by descriptor."""

OWN_DATA = "data that the package brings"
WRITES = "creates a file that it writes to"
CHILD = "a process that its parent writes to"

AROUND = {
    "__main__.py": (1, "the null device, in place of a closed stream"),
    "bench/journal.py": (1, WRITES),
    "bench/precompile.py": (1, CHILD),
    "cache/cache_file.py": (1, "a lock, of which nothing is read"),
    "cache/measurement_keys.py": (1, "the package's own source"),
    "checkpoint/source/catalogue.py": (1, OWN_DATA),
    "cli/explain/page/__init__.py": (1, OWN_DATA),
    "cli/output.py": (1, "the null device, in place of a closed pipe"),
    "convert/execute/update_folder.py": (1, WRITES),
    "convert/manifest/manifest.py": (1, "maps a file that was opened through the seam"),
    "convert/manifest/progress_log.py": (2, WRITES),
    "convert/stream/devices.py": (1, "memory without a file"),
    "environment/named_devices.py": (1, OWN_DATA),
    "environment/python_environments.py": (
        1,
        "importlib.metadata reads it, as any import of the package would",
    ),
    "explain/engine_answer.py": (1, WRITES),
    "files/atomic.py": (4, WRITES),
    "files/lock.py": (2, WRITES),
    "kernels/triton/hopper/stream_asm.py": (1, "the package's own source"),
    "kernels/choice/launch_model.py": (1, OWN_DATA),
    "kernels/choice/launch_table.py": (1, OWN_DATA),
    "kernels/choice/surveyed_times.py": (1, OWN_DATA),
    "layer/background_compile.py": (1, CHILD),
    "layer/compile_ahead.py": (1, CHILD),
    "oracle/engines/sglang_0_5_23/data/__init__.py": (1, OWN_DATA),
    "oracle/engines/transformers_5/data/__init__.py": (1, OWN_DATA),
    "oracle/engines/vllm_0_33_0/own_code/ask.py": (1, CHILD),
    "oracle/engines/vllm_0_33_0/own_code/vllm_worker.py": (2, CHILD),
    "oracle/engines/vllm_0_33_0/packages.py": (1, OWN_DATA),
    "oracle/name_history.py": (2, OWN_DATA),
    "peers/fetch.py": (2, WRITES),
    "peers/pinned.py": (1, OWN_DATA),
    "run/workload.py": (1, "a given file, whose header is checked before safetensors reads its tensors"),
}
"""Files that open or read in another way: how often, and why that is bounded or not a reader."""

OPENERS = {"os", "io", "codecs", "lzma", "gzip", "bz2", "tarfile", "zipfile", "tokenize", "shelve", "dbm"}
LOADERS = {"json", "pickle", "marshal", "torch", "np", "numpy", "tomllib", "plistlib"}
WHOLE = {"safe_open", "load_file", "fromfile", "memmap", "mmap", "ZipFile", "TarFile", "ConfigParser"}
"""Functions that open a file by its name, or read all of an open one."""

OPENED = {"open_regular", "open_inside", "open_given", "read_open", "file", "open", "fdopen"}


MENTIONS = re.compile(
    r"\b(read_text|read_bytes|\w*open\w*|file|load\w*|memmap|mmap|fromfile|readline|\w+File|\w+Parser)\("
)
"""Text without which a module cannot have a reader: parsing all of them takes seconds."""


def called(call: ast.Call) -> tuple[str, str]:
    """The name of a function, and that of what has it: empty for a function by itself, ``?`` for no name."""
    match call.func:
        case ast.Name(name):
            return "", name
        case ast.Attribute(ast.Name(owner) | ast.Attribute(attr=owner), name):
            return owner, name
        case ast.Attribute(attr=name):
            return "?", name
    return "?", ""


def readers(tree: ast.AST) -> Iterator[str]:
    """What in a module opens a file, or reads all of an open one however long it is."""
    opened = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.With, ast.AsyncWith))
        for item in node.items
        if isinstance(item.context_expr, ast.Call) and isinstance(item.optional_vars, ast.Name)
        if called(item.context_expr)[1] in OPENED
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        owner, name = called(node)
        mode = not node.args or isinstance(node.args[0], ast.Constant)
        around = name == "read_text" or (name == "read_bytes" and not node.args)
        around |= name == "open" and (owner in ("", *OPENERS) or (mode and owner != "self"))
        around |= name == "load" and owner in LOADERS
        around |= name in WHOLE or (owner, name) == ("stdin", "readline")
        around |= name in ("read", "readlines") and not node.args and owner in opened
        if around:
            yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


def test_every_reader_passes_through_the_seams() -> None:
    found = {
        name: lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := path.relative_to(PACKAGE).as_posix()) not in SEAMS
        if MENTIONS.search(text := path.read_text(encoding="utf-8"))
        if (lines := list(readers(ast.parse(text))))
    }
    more = {name: lines for name, lines in found.items() if len(lines) > AROUND.get(name, (0, ""))[0]}
    assert more == {}
    assert {name: len(lines) for name, lines in found.items()} == {
        n: many for n, (many, _) in AROUND.items()
    }, "an exception that is none any more"


@pytest.mark.parametrize(
    "line",
    [
        "open('a')",
        "path.open()",
        "path.open('rb')",
        "path.read_text(encoding='utf-8')",
        "path.read_bytes()",
        "(folder / 'a').read_bytes()",
        "os.open(path, os.O_RDONLY)",
        "lzma.open(path)",
        "json.load(file)",
        "torch.load(path)",
        "safe_open(path, framework='pt')",
        "safetensors.torch.load_file(path)",
        "mmap.mmap(fd, 0)",
        "with open_regular(path, 'it') as file: file.read()",
        "with handle.file('a') as file: file.readlines()",
        "sys.stdin.readline()",
    ],
)
def test_a_reader_around_them_would_be_seen(line: str) -> None:
    assert MENTIONS.search(line) and list(readers(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "folder.open(name)",
        "batches.read_bytes(1)",
        "with open_regular(path, 'it') as file: file.read(LIMIT)",
        "json.loads(text)",
        "read_bounded(path, LIMIT, 'it')",
    ],
)
def test_what_is_bounded_is_none(line: str) -> None:
    assert list(readers(ast.parse(line))) == []
