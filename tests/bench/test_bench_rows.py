"""Settings, files of rows, what survives a kill, and tables."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moectl.bench.bench_rows import NOISY_SPREAD, BenchRow, PreparationCosts
from moectl.bench.journal import RowJournal, RunHeader
from moectl.bench.read_rows import read_rows
from moectl.bench.row_tables import as_csv, document, markdown, number
from moectl.bench.settings import BenchSettings, parse_counts
from moectl.errors import Unavailable, UsageError
from support.bench_rows import FAILED, MACHINE, ROWS, row_of, run, settings_of, write

COSTS = PreparationCosts(0.5, 0.25, 0.75, 0.125, 10**9, 10**9, 2 * 10**9)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", (1,)), ("1,8,64-1024*4", (1, 8, 64, 256, 1024)), ("3-20", (3, 6, 12)), ("8,1,8", (8, 1))],
)
def test_token_counts(text, counts):
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0", "1,,2", "8-4x", "4-8*1", "-3", "99999999999", "1.5", "0-8"])
def test_bad_token_counts(text):
    with pytest.raises(UsageError):
        parse_counts(text)


def test_former_names_of_backends_are_read_as_the_present_ones(tmp_path):
    path = tmp_path / "rows.jsonl"
    header = {"kind": "run", "schema_version": 2, "settings": {"backends": ["triton_marlin", "torch"]}}
    names = ("triton", "triton_marlin", "triton_kernels")
    rows = [{"kind": "row", **row_of(backend=name).to_json()} for name in names]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))
    found = read_rows(path)
    assert [row.backend for row in found.rows] == ["moectl", "moectl_marlin", "triton_kernels"]
    assert found.settings["backends"] == ["moectl_marlin", "torch"]
    engine = row_of(backend="triton", scheme="bf16, a16 activations").to_json()
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, {"kind": "row", **engine})))
    assert read_rows(path).rows[0].backend == "triton", "an engine's, which has other formats"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": "x"}, "named models, and both were given"),
        ({"models": ()}, "named models, and neither was given"),
        ({"tokens": ()}, "from 1 to"),
        ({"tokens": (0,)}, "from 1 to"),
        ({"routings": ()}, "needs a routing"),
        ({"routings": ("often",)}, "not known"),
        ({"routings": ("trace:nowhere.jsonl",)}, "does not exist"),
        ({"rounds": 0}, "one round"),
        ({"input": "x.safetensors"}, "no routing is `router`"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        settings_of(**changes)


def test_rows_come_back_from_every_file(tmp_path):
    about = RunHeader(settings_of().to_json(), MACHINE).to_json()
    (tmp_path / "a.csv").write_text(as_csv(about, ROWS))
    (tmp_path / "a.json").write_text(json.dumps(document(about, ROWS)))
    write(tmp_path / "a.jsonl", *ROWS)
    for name in ("a.csv", "a.json", "a.jsonl"):
        found = read_rows(tmp_path / name)
        assert found.rows == ROWS, name
        assert found.about["device"] == "a CPU"
    lines = list(csv.DictReader(io.StringIO(as_csv(about, ROWS))))
    assert lines[0]["versions"] == "moectl 0.1.0, torch 2.11" and lines[0]["repack_s"] == "0.25"


def test_numbers_that_are_not_finite_become_none():
    assert row_of(error_rms=math.nan).to_json()["error_rms"] is None
    json.dumps(row_of(error_max=math.inf).to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", "does not begin"),
        ("a.jsonl", "{}\n", "not a line of a bench"),
        ("a.jsonl", "[1]\n", "line 1 must be a JSON object, got a list"),
        ("a.jsonl", '{"kind": "run"}\n{"kind": "row", "model": "x"}\n', "line 2 is no row.* lacks backend"),
        ("a.jsonl", '{"kind": "run"}\nnonsense\n', "line 2 is not valid JSON"),
        ("a.json", '{"rows": 3}', "has no rows"),
        ("a.json", "{", "not valid JSON at line 1"),
        ("a.csv", "model,layers\nx,0\n", "line 2 is no row"),
        ("a.txt", "", "is not that of a file of rows"),
    ],
)
def test_files_that_are_none_of_a_bench_are_refused(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=words):
        read_rows(tmp_path / name)
    with pytest.raises(UsageError, match="cannot read"):
        read_rows(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", "many"),
        ("tokens", 1.5),
        ("ok", 3),
        ("median_us", "x"),
        ("median_us", True),
        ("tokens", 1.0),
        ("tokens", "1"),
        ("model", 5),
        ("layer", None),
    ],
)
def test_fields_of_other_types_are_refused(field, value):
    data = ROWS[0].to_json() | {field: value}
    with pytest.raises(UsageError, match=f"here: {field} must be (a|true)"):
        BenchRow.from_json(data, "here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"median_us": -5}, "median_us must be from 0.001 to 1e.09, got -5"),
        ({"fastest_us": 0}, "fastest_us must be from 0.001"),
        ({"median_us": 1e300}, "median_us must be from 0.001"),
        ({"ok": False}, "only right results have one, and ok is False"),
        ({"ok": None}, "only right results have"),
        ({"q1_us": 200, "q3_us": 100}, "q1_us 200 is above q3_us 100"),
    ],
)
def test_rows_that_no_bench_writes_are_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        BenchRow.from_json(ROWS[0].to_json() | changes, "here")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_rows_of_another_schema_are_refused(tmp_path, name):
    about = {"kind": "run", "schema_version": 9}
    (tmp_path / name).write_text(json.dumps(about | {"rows": []}) + "\n")
    with pytest.raises(UsageError, match="schema version 9, and this moectl reads 1 or 2"):
        read_rows(tmp_path / name)


def test_a_line_that_was_cut_off_is_written_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    write(path, *ROWS[:2])
    path.write_bytes(path.read_bytes()[:-40])
    with RowJournal.open(path, resume=True) as journal:
        assert journal.before.rows == ROWS[:1]
        journal.begin(run())
        journal.add(ROWS[1])
    assert read_rows(path).rows == ROWS[:2]
    with pytest.raises(UsageError, match="is not empty"):
        RowJournal.open(path)


@pytest.mark.parametrize("kept", [1, 9, 14, 60, -1])
def test_a_bench_killed_within_its_first_line_is_begun_anew(tmp_path, kept):
    path, begun = tmp_path / "rows.jsonl", tmp_path / "begun.jsonl"
    write(begun)
    path.write_bytes(begun.read_bytes()[:kept])
    with pytest.raises(UsageError, match="is not empty"):
        RowJournal.open(path)
    with RowJournal.open(path, resume=True) as journal:
        assert journal.before is None
        journal.begin(run())
        journal.add(ROWS[0])
    assert read_rows(path).rows == ROWS[:1]


KILLED = """
import os, signal, sys
from pathlib import Path
from moectl.bench.journal import RowJournal, RunHeader
plain = os.write
def write(fd, data):
    if fd > 2:
        plain(fd, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(fd, data)
os.write = write
with RowJournal.open(Path(sys.argv[1])) as journal:
    journal.begin(RunHeader({}, {}))
"""


def test_a_process_killed_while_it_writes_its_first_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -signal.SIGKILL
    assert path.stat().st_size and b"\n" not in path.read_bytes()
    with RowJournal.open(path, resume=True) as journal:
        journal.begin(run())
        journal.add(ROWS[0])
    assert read_rows(path).rows == ROWS[:1]


def test_a_line_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(fd, data):
        written = plain(fd, data[: len(data) // 2])
        monkeypatch.setattr(os, "write", lambda fd, data: 1 / 0)
        if written < len(data):
            raise OSError(errno.ENOSPC, "no space")
        return written

    path, plain = tmp_path / "rows.jsonl", os.write
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unavailable, match=r"cannot write .*no space"), RowJournal.open(path) as journal:
        journal.begin(run())
    assert not path.exists()


def test_a_file_has_one_writer_and_is_not_left_behind_empty(tmp_path):
    path = tmp_path / "rows.jsonl"
    for resume in (False, True):
        with (
            RowJournal.open(path, resume=resume),
            pytest.raises(Unavailable, match=f"another bench is writing to {path}"),
        ):
            RowJournal.open(path, resume=True)
        assert not path.exists()
    write(path, ROWS[0])
    with RowJournal.open(path, resume=True) as journal:
        with pytest.raises(Unavailable, match="another bench"):
            RowJournal.open(path, resume=True)
        journal.begin(run())
        journal.add(ROWS[1])
    assert read_rows(path).rows == ROWS[:2]


def test_a_file_of_something_else_is_left_as_it_is(tmp_path):
    path = tmp_path / "notes.jsonl"
    for text, words in (
        ("my notes\nand more", "line 1 is not valid JSON"),
        ('{"kind": "row"', "does not begin with the header of a bench"),
        ("notes", "does not begin with the header of a bench"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            RowJournal.open(path, resume=True)
        assert path.read_text() == text


def test_more_may_be_asked_for_later(tmp_path):
    """Token counts, routings, models and backends are added; the file tells all that was asked for."""
    path = tmp_path / "rows.jsonl"
    with RowJournal.open(path) as journal:
        journal.begin(run(backends=("torch",)))
        journal.add(ROWS[0])
    same = path.read_text()
    with RowJournal.open(path, resume=True) as journal:
        journal.begin(run(backends=("torch",)))
        journal.begin(run(backends=("torch",), tokens=(40,), device="cpu"))
    assert path.read_text() == same
    more = {"models": ("tiny", "other"), "tokens": (2,), "routings": ("balanced",), "backends": ("moectl",)}
    with RowJournal.open(path, resume=True) as journal:
        about = journal.begin(run(**more))
        journal.add(ROWS[1])
    found = read_rows(path)
    assert found.rows == ROWS[:2] and found.about == about
    assert [found.settings[name] for name in ("models", "tokens", "routings", "backends")] == [
        ["tiny", "other"],
        [1, 40, 2],
        ["uniform", "balanced"],
        ["torch", "moectl"],
    ]
    with RowJournal.open(path, resume=True) as journal:
        assert journal.begin(run())["settings"]["backends"] == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (run(seed=5, tokens=(2,)), "new ones: --seed is 5, was 0$"),
        (run(layer=3, warm=False), "--layer is 3, was not given; --warm is not given, was given$"),
        (run(rounds=9, tp=2), "--tp is 2, was 1; --repeats is 9, was 3$"),
        (run(MACHINE | {"device": "a GPU"}), "the device is a GPU, was a CPU$"),
        (
            run(MACHINE | {"versions": {"torch": "2.12"}}),
            "moectl is none, was 0.1.0; .* torch is 2.12, was 2.11$",
        ),
    ],
)
def test_rows_of_another_kind_are_not_added(tmp_path, asked, words):
    path = tmp_path / "rows.jsonl"
    write(path, ROWS[0])
    with RowJournal.open(path, resume=True) as journal, pytest.raises(UsageError) as caught:
        journal.begin(asked)
    assert re.search(words, caught.value.what) and "may be" in caught.value.hint
    assert read_rows(path).rows == ROWS[:1]


def test_other_content_of_a_trace_is_another_run(tmp_path):
    trace, path = tmp_path / "t.jsonl", tmp_path / "rows.jsonl"
    trace.write_text("[0, 1]\n")
    asked = settings_of(routings=(f"trace:{trace}",))
    write(path)
    with RowJournal.open(path, resume=True) as journal:
        journal.begin(RunHeader(asked.to_json(), MACHINE))
    trace.write_text("[1, 0]\n")
    with (
        RowJournal.open(path, resume=True) as journal,
        pytest.raises(UsageError, match=f"the content of {trace} has changed"),
    ):
        journal.begin(RunHeader(asked.to_json(), MACHINE))


def test_a_table_that_pastes_into_an_issue():
    text = markdown(MACHINE, ROWS)
    times, costs, foot = text.strip().split("\n\n")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in times.splitlines()]
    assert len({len(line) for line in lines}) == 1 and len({len(line) for line in times.splitlines()}) == 1
    head = lines[0]
    assert "model" not in head and {"backend", "M", "µs", "±", "error", "tactic"} <= set(head)
    first, _, failed = (dict(zip(head, line, strict=True)) for line in lines[2:])
    assert first["µs"] == "100.0" and first["±"] == "2.5" and first["of roofline"] == "50%"
    assert failed["µs"] == "-" and failed["no time because"] == "RuntimeError: a / b"
    assert first["throttled"] == "power cap"
    assert "repack s" in costs and "0.250" in costs and "2.00" in costs
    assert "a CPU" in foot and "torch 2.11" in foot and "4000 GB/s" in foot
    assert "SM clock 1980 to 1980 MHz; throttled in 1 of 1 rows (power cap)" in foot
    assert "model tiny" in foot and "routing uniform" in foot
    refused = replace(FAILED, backend="picky", refused=True, reason="it wants biases")
    partly = markdown(MACHINE, (*ROWS, refused))
    assert "- not supported by picky: tiny: it wants biases" in partly and "| picky" not in partly
    long = markdown(MACHINE, (row_of(), replace(FAILED, reason="two\nlines " * 100)))
    assert "two lines two" in long and "..." in long and len(max(long.splitlines(), key=len)) < 500
    both = markdown(MACHINE, (*ROWS, row_of(model="other")))
    assert "| model" in both


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 3, "-"),
        (0.0, 3, "0"),
        (1234.56, 4, "1235"),
        (12.345, 4, "12.35"),
        (99.96, 3, "100"),
        (0.00123, 3, "0.00123"),
        (1.66e-05, 3, "1.66e-05"),
    ],
)
def test_numbers_in_tables(value, digits, text):
    assert number(value, digits) == text


def spread(share, **changes):
    """A row of 200 us whose quartiles lie `share` of that apart."""
    return row_of(median_us=200.0, q1_us=190.0, q3_us=190.0 + 200 * share, **changes)


def test_noisy_times_are_reported(tmp_path):
    steady = (spread(NOISY_SPREAD - 0.001), spread(3.0, tokens=2, rounds=2), replace(FAILED, tokens=4))
    assert "noisy" not in markdown(MACHINE, steady)
    assert document(MACHINE, steady)["unsteady"] == {"threshold": NOISY_SPREAD, "cells": []}
    rows = (*steady, spread(0.11, tokens=8), spread(1.5, tokens=16, backend="moectl"))
    assert [row.noisy for row in rows] == [False, False, False, True, True]
    (line,) = [line for line in markdown(MACHINE, rows).splitlines() if "noisy" in line]
    assert "2 of 4 rows" in line and "10% of the median" in line and "moectl at M=16 (150%)" in line
    others = (*rows, spread(2.0, tokens=8, model="kimi-k2", routing="zipf:1.2"))
    assert f"{rows[0].backend} at M=8 (200%; kimi-k2; zipf:1.2)" in markdown(MACHINE, others)
    found = document(MACHINE, rows)
    cells = found["unsteady"]["cells"]
    assert [(it["backend"], it["tokens"], round(it["spread"], 3)) for it in cells] == [
        ("moectl", 16, 1.5),
        (rows[0].backend, 8, 0.11),
    ]
    assert [tuple(cell.values())[:-1] for cell in cells] == [rows[4].key, rows[3].key]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(found))
    again = read_rows(path)
    assert again.about == MACHINE and document(again.about, again.rows)["unsteady"] == found["unsteady"]


def test_settings_are_plain_data():
    assert json.loads(json.dumps(settings_of().to_json()))["tokens"] == [1, 40]
    assert BenchSettings(checkpoint="x").caches == "cold"


def test_a_row_that_a_failing_disk_does_not_take_is_one_sentence(tmp_path, monkeypatch):
    """Also when the disk does not let it be taken back; the rows before it count."""

    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "rows.jsonl"
    with RowJournal.open(path) as journal:
        journal.begin(run())
        journal.add(ROWS[0])
        for name in ("fsync", "ftruncate"):
            monkeypatch.setattr(os, name, refuse)
        with pytest.raises(Unavailable, match=r"cannot write .*rows\.jsonl: Input/output error"):
            journal.add(ROWS[1])
    monkeypatch.undo()
    assert read_rows(path).rows[:1] == ROWS[:1]


def test_a_new_file_of_rows_stays_when_the_power_is_cut(tmp_path, monkeypatch):
    """Its name is synced with its first line."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    with RowJournal.open(tmp_path / "rows.jsonl") as journal:
        journal.begin(run())
        journal.add(ROWS[0])
    assert synced == [tmp_path / "rows.jsonl", tmp_path, tmp_path / "rows.jsonl"]
