"""`scripts/break_readers` changes every kind of input, and knows a wrong answer."""

from __future__ import annotations

import ast
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from devtools.breaking import outcomes
from devtools.breaking.changes import changed_document, with_hostile_fields
from devtools.breaking.headers import header_readers, packed, read_both
from devtools.breaking.outcomes import WrongAnswerError, defect_of
from devtools.breaking.search import Reader, Search, shares

import moectl
from moectl.errors import CheckpointError
from moectl.files import folder_handle, safe_reading, safetensors_header
from support.scripts import loaded

CASES = 2000
"""Cases of all readers that run with the other tests; by their shares most are headers."""

HEADERS = 8000
"""Further cases of headers, at a sixth of a millisecond each."""

SEED = 11

PACKAGE = Path(moectl.__file__).parent

HASHED = "takes a hash of what it reads, or copies it, and looks at nothing in it"
MACHINE = "a file of the system or of an installed package, which whoever could change it need not"

NOT_CHANGED = {
    "bench/settings.py _sha256": HASHED,
    "capabilities/unpacked_libraries.py _digest": HASHED,
    "convert/execute/finish.py write_small_files": HASHED,
    "convert/execute/output_checks.py _refuse_other_sharing": HASHED,
    "convert/execute/passthrough.py _copy": HASHED,
    "convert/execute/passthrough.py _recorded": HASHED,
    "convert/execute/passthrough.py passthrough_sha256": HASHED,
    "convert/execute/passthrough.py write_passthrough": HASHED,
    "convert/execute/shared_files.py _manifest_file": HASHED,
    "convert/execute/update_folder.py _small_sha256": HASHED,
    "convert/manifest/checked_files.py refuse_changed": HASHED,
    "convert/manifest/manifest.py load_layer": "maps a file whose header `open_layer` has read",
    "convert/portable/portable_plan.py _quantizer_words": HASHED,
    "convert/quantize/calibration.py tokens": "reads numbers of a file whose header `Calibration` has read",
    "convert/restore/unconvert.py _write_documents": HASHED,
    "convert/restore/verify.py __init__": HASHED,
    "convert/restore/verify.py compare_files": HASHED,
    "environment/host.py _container": MACHINE,
    "environment/python_environments.py _settings": MACHINE,
    "environment/python_environments.py _with_linked": MACHINE,
    "environment/sysfs_gpus.py _properties": MACHINE,
    "explain/engine_answer.py _last_line": "a line of text, shown through `printable` as all text is",
    "files/lock.py _create_lock_file": "a lock, of which the number of a process is read",
    "integrations/serve_files.py _changed_documents": HASHED,
    "kernels/external/import_library.py _decompress": MACHINE,
    "kernels/external/triton_source.py _jit_functions": MACHINE,
    "kernels/timing/cold_calls.py _cpu_cache": MACHINE,
    "layer/compile_ahead.py _free_memory": MACHINE,
    "peers/fetch.py _matches": HASHED,
}
"""Functions that read files and get no changed input, but by chance from a command line, with the reason."""


def opening_functions() -> set[str]:
    """The functions of the seams that take a path and open what is there."""
    found = set()
    for module in (safe_reading, folder_handle):
        for name, value in vars(module).items():
            if callable(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                parameters = [*inspect.signature(value).parameters.values()]
                if parameters and parameters[0].annotation == "Path":
                    found.add(name)
    return found


def reading_functions() -> set[str]:
    """Every function of the package that opens a file through the seams: its module and name."""
    opening, found = opening_functions(), set()

    def visit(node: ast.AST, module: str, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in opening:
            found.add(f"{module} {function}")
        for child in ast.iter_child_nodes(node):
            visit(child, module, function)

    for path in PACKAGE.rglob("*.py"):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        if path.name not in ("safe_reading.py", "folder_handle.py") and any(f"{f}(" in text for f in opening):
            visit(ast.parse(text), name, "")
    return found


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The functions of the package in which files were opened, by module and name."""
    found: set[str] = set()
    opened, package = os.open, f"{PACKAGE}/"

    def noting(*args: object, **options: object) -> int:
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(package):
                found.add(f"{code.co_filename.removeprefix(package)} {code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
        return opened(*args, **options)  # type: ignore[arg-type]

    with mock.patch.object(os, "open", noting):
        yield found


def test_changes_of_every_kind_of_input_find_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entered: set[str]
) -> None:
    script = loaded("break_readers")
    for name, value in script.own_caches(tmp_path).items():
        monkeypatch.setenv(name, value)
    search = Search(SEED)
    readers = list(script.all_readers(tmp_path))
    entered.clear()
    for reader, number in shares(readers, CASES):
        search.case(reader, number)
    assert set(search.cases) == {reader.name for reader in readers}
    assert len(readers) > 60 and search.cases.total() > CASES - len(readers)
    assert not search.found, search.to_json()["defects"]
    known = reading_functions()
    assert len(known) > 60 and NOT_CHANGED.keys() <= known
    assert known - entered <= NOT_CHANGED.keys()


def test_functions_that_open_files_are_known() -> None:
    assert {
        "open_regular",
        "read_given",
        "open_inside",
        "file_findings",
        "FolderHandle",
    } <= opening_functions()
    assert not {"bounded", "read_open", "unreadable"} & opening_functions()
    assert "convert/manifest/signed_document.py read_small" in reading_functions()


def test_headers_of_many_kinds_find_nothing_wrong(tmp_path: Path) -> None:
    (headers, *_) = header_readers(tmp_path)
    search = Search(SEED)
    search.unchanged(headers)
    for number in range(HEADERS):
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


@pytest.mark.parametrize(
    ("words", "variables", "asked"),
    [
        (("list", "gpus"), {}, False),
        (("list", "gpus", "--color", "always"), {}, True),
        (("list", "gpus", "--color=always"), {}, True),
        (("list", "always", "--color", "never"), {}, False),
        (("list", "gpus"), {"MOECTL_COLOR": "always"}, True),
        (("serve-check", "x"), {"MOECTL_SERVE_CHECK_COLOR": "always"}, True),
        (("list", "gpus"), {"MOECTL_BENCH_COLOR": "always"}, False),
    ],
)
def test_who_asks_for_colors(
    words: tuple[str, ...], variables: dict[str, str], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert outcomes.asks_for_color(words) == asked


def test_colors_that_were_asked_for_are_no_defect() -> None:
    words = ("explain", "openai/gpt-oss-20b", "--offline", "--gpu", "h200")
    assert outcomes.command(*words, "--color", "always") == outcomes.command(*words)
    said = outcomes.command("explain", "x\x1b[31m", "--offline", "--color", "always")
    assert "error: " in said and not outcomes.raw_characters(said)


def test_other_sequences_than_moectls_colors_are_a_defect() -> None:
    kept = outcomes.without_colors("\x1b[1;31merror:\x1b[0m \x1b[31mred \x1b[2Jx \x1b[1;32mok\x1b[0m")
    assert kept == "error: \x1b[31mred \x1b[2Jx ok"


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
