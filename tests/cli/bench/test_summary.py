"""The tables of `moectl bench` and `moectl compare` on terminals and pipes of any width and encoding."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest

from moectl.bench.bench_rows import BenchRow
from moectl.bench.pivot import filtered, geometric_mean, pivot_tables
from moectl.bench.row_tables import one_line
from moectl.cli.bench.output import grid, pivot_cells
from support import python_forks
from support.bench_rows import row_of
from support.invoking import moectl

ROWS = Path(__file__).resolve().parents[3] / "docs" / "bench_h200.jsonl"


def at(backend: str, tokens: int, us: float | None, **changes) -> BenchRow:
    times = {} if us is None else {"median_us": us, "q1_us": us, "q3_us": us, "fastest_us": us}
    blank = {"median_us": None, "q1_us": None, "q3_us": None, "fastest_us": None, "floor_percent": None}
    share = {} if us is None else {"floor_percent": 5000 / us}
    return row_of(backend=backend, tokens=tokens, **{**blank, **times, **share, **changes})


def test_backends_are_ordered_by_their_ratio_to_the_best_other_one():
    rows = [at("slow", 1, 400.0), at("fast", 1, 100.0), at("second", 1, 200.0)]
    rows += [at("slow", 8, 800.0), at("fast", 8, 100.0), at("wrong", 8, None, ok=False, reason="off")]
    rows += [at("never", 1, None, refused=True, reason="needs SM80")]
    (table,) = pivot_tables(rows)
    assert [line.backend for line in table.lines] == ["fast", "second", "slow", "wrong"]
    assert [line.ratio for line in table.lines[:3]] == pytest.approx([4.0, 0.5, 2**-2.5])
    assert table.lines[1].shared == 1 and table.lines[3].ratio is None
    assert table.lines[0].roofline == pytest.approx(0.5) and table.refused == {"never": "needs SM80"}
    assert table.best == {1: "fast", 8: "fast"} and table.tokens == (1, 8)
    cells = pivot_cells(table, "slow")
    assert [line[0] for line in cells] == [
        ("backend", "strong"),
        ("fast", "good"),
        ("second", ""),
        ("slow *", ""),
        ("wrong", ""),
        ("roofline", "dim"),
    ]
    assert cells[1][3:] == [("100", "good"), ("100", "good")] and cells[4][4] == ("wrong", "wrong")
    assert cells[2][1:3] == [("0.50x?", ""), ("25%", "")] and cells[2][4] == ("", "")
    assert geometric_mean([]) is None and filtered(rows, backends=["fast"], tokens=[8]) == (rows[4],)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_a_table_fits_and_loses_no_cell(width):
    lines = [[(f"backend{n}", ""), *((f"{n}.{i}", "") for i in range(9))] for n in range(3)]
    drawn = ["".join(text for text, _ in line) for line in grid(lines, width)]
    assert all(len(line) <= width for line in drawn)
    words = " ".join(drawn).split()
    assert all(words.count(text) == 1 for line in lines for text, _ in line[1:])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_recorded_run_is_readable(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    done = moectl("bench", "--rows", ROWS)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= width and len(lines) < (170 if width < 80 else 120)
    assert max(len(line) for line in lines if line.startswith("  moectl")) <= width
    start = next(n for n, line in enumerate(lines) if line.startswith("gpt-oss-120b") and "uniform" in line)
    if width < 80:
        start += 1
        assert lines[start] == "  routing (µs)"
    assert lines[start + 2].split()[:2] == ["moectl", "1.51x"]
    assert any(line.startswith("  triton_kernels *") for line in lines[start : start + 7])
    assert "* picked by vLLM 0.33.0 with its default packages" in lines
    assert "\nNVIDIA H200, torch" in done.stdout
    reasons = [line for line in lines if line.startswith("  triton_kernels: matmul_ogs does not compute")]
    assert len(reasons) == 2, "once for each of the layers in INT4, whatever the number of routings"
    assert "a16" not in done.stdout and "-0.33" not in done.stdout


def test_references_are_compared_with_nothing():
    rows = [at("moectl", 1, 100.0), at("torch", 1, 9000.0), at("emulation", 1, 50.0)]
    (table,) = pivot_tables(rows)
    assert [(line.backend, line.ratio, line.reference) for line in table.lines] == [
        ("moectl", None, False),
        ("torch", None, True),
        ("emulation", None, True),
    ]
    assert table.best == {1: "moectl"} and table.speedups("moectl") == {}
    head, ours, *others = pivot_cells(table, "")
    assert [text for text, _ in head] == ["backend", "roofline", "M=1"] and ours[2] == ("100", "good")
    assert [line[0][0] for line in others] == ["torch (reference)", "emulation (reference)", "roofline"]
    (table,) = pivot_tables([*rows, at("marlin", 1, 150.0), at("moectl_marlin", 1, 120.0)])
    assert table.speedups("moectl") == {1: pytest.approx(1.2)}
    assert table.speedups("moectl", besides=("moectl_marlin",)) == {1: pytest.approx(1.5)}
    assert table.speedups("nobody") == {}


@pytest.mark.parametrize(
    ("backends", "pick", "words"),
    [
        ([], "triton_kernels", "not timed, as it is not installed here; install it, and run the bench again"),
        (["moectl"], "triton_kernels", "not timed, as --backend does not name triton_kernels"),
        ([], "", "moectl cannot time it"),
        ([], "marlin", "marlin does not run here, see above"),
        (["triton_kernels", "moectl"], "triton_kernels", None),
        ([], "humming", None),
    ],
)
def test_what_the_engine_picks_is_marked_or_said_to_be_missing(tmp_path, monkeypatch, backends, pick, words):
    monkeypatch.setenv("COLUMNS", "200")
    rows = [at(name, 1, us) for name, us in (("moectl", 100.0), ("humming", 150.0))]
    rows.append(
        at("marlin", 1, None, refused=True, reason="backend marlin does not support this deployment: X")
    )
    picked = {"model": "tiny", "layers": "0-3", "scheme": "mxfp4", "parallel": "1", "backend": pick}
    about = {"settings": {"backends": backends}, "engine_picks": [{**picked, "title": "name (the field's)"}]}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({**about, "rows": [row.to_json() for row in rows]}))
    text = moectl("bench", "--rows", path).stdout
    assert text.count("  marlin: X\n") == 1
    sentence = f"vLLM 0.33.0 picks name (the field's) for tiny: {words}\n"
    assert (sentence in text) == (words is not None) and text.count("vLLM 0.33.0 picks") == (
        words is not None
    )
    assert ("* picked by" in text) == ("humming *" in text) == (pick == "humming")


REFUSAL = f"does not support this deployment: {'no such GPU ' * 20}"


def test_a_measured_row_fits_the_terminal():
    row = at("flashinfer_cutlass", 4096, 2491.0, model="gpt-oss-120b", layers="-", routing="experts:4")
    wide = one_line(row)
    assert wide.startswith("gpt-oss-120b experts:4 M=4096 flashinfer_cutlass   2491 µs ±0 ")
    assert wide.endswith("2% roofline")
    assert [len(one_line(row, width)) <= width for width in (56, 60, 70, 80, 100)] == [True] * 5
    assert one_line(row, 60) == "gpt-oss-120b experts:4 M=4096 flashinfer_cutlass   2491 µs"
    refused = replace(row, median_us=None, refused=True, reason=f"backend {row.backend} {REFUSAL}")
    assert one_line(refused).endswith(f"refused  {'no such GPU ' * 20}".rstrip())
    assert len(one_line(refused, 80)) == 80 and one_line(refused, 80).endswith("...")
    assert one_line(row, 56) == "gpt-oss-120b experts:4 M=4096 flashinfer_cutlass 2491 µs"
    assert one_line(row, 80) == one_line(row, 100) == wide


def test_rows_of_a_file_are_filtered():
    done = moectl(
        "bench", "--rows", ROWS, "--model", "kimi-k2", "--backend", "Moectl,humming", "-m", "16", "-q"
    )
    found = [line.split("\t") for line in done.stdout.splitlines()]
    assert {(row[0], row[5], row[6]) for row in found} == {
        ("kimi-k2", "moectl", "16"),
        ("kimi-k2", "humming", "16"),
    }
    assert len({tuple(row[:7]) for row in found}) == len(found) == 6, "every line says which case it is"
    assert "It has M=1, 4, 16" in moectl("bench", "--rows", ROWS, "-m", "7", code=2).stderr
    assert "mean kimi-k2" in moectl("bench", "--rows", ROWS, "--model", "kimi", code=2).stderr
    both = moectl("compare", ROWS, ROWS, "--model", "kimi-k2", "-m", "1", "--backend", "moectl").stdout
    assert both.splitlines()[-1] == "1 case: 1 same; B/A 1.000, geometric mean"


def test_compare_begins_with_what_became_slower(tmp_path, monkeypatch):
    lines = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for number, factor in ((3, 0.5), (1, 1.3), (2, 2.0)):
        for name in ("median_us", "q1_us", "q3_us", "fastest_us"):
            lines[number][name] *= factor
    later = tmp_path / "later.jsonl"
    later.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = moectl("compare", ROWS, later, code=1)
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [row[-2:] for row in table[1:]] == [["2.000", "slower"], ["1.300", "slower"], ["0.500", "faster"]]
    assert "280 cases: 2 slower, 1 faster, 221 same, 56 untimed; B/A 1.001" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.count("\n") < 10
    monkeypatch.setenv("COLUMNS", "60")
    narrow = moectl("compare", ROWS, later, code=1).stdout.splitlines()
    assert max(map(len, narrow)) <= 60 and narrow[0].split() == ["M", "A", "µs", "B", "µs", "B/A", "verdict"]
    assert len([line for line in narrow if line.startswith("gpt-oss-120b uniform ")]) == 3
    everything = moectl("compare", ROWS, later, "-v", code=1).stdout
    assert everything.count(" same") >= 221


def test_ctrl_c_prints_what_was_measured(tiny_gpt_oss, tmp_path):
    counts = ",".join(map(str, range(1, 400)))
    options = ["-m", counts, "--repeats", "3", "--device", "cpu", "--warm", "--backend", "torch"]
    reader, writer = os.pipe()
    with (tmp_path / "notes").open("w") as said:
        process = python_forks.start(["-m", "moectl", "bench", tiny_gpt_oss, *options], writer, said)
    os.close(writer)
    with os.fdopen(reader) as stdout:
        lines = [stdout.readline() for _ in range(3)]
        os.kill(process.pid, signal.SIGINT)
        rest = stdout.read()
    status, notes = process.wait(timeout=120), (tmp_path / "notes").read_text()
    assert [line.split()[3] for line in lines] == ["M=1", "M=2", "M=3"]
    assert status == 130 and "warning: interrupted: " in notes and "Traceback" not in notes
    assert re.search(r"backend +roofline +M=1 +2 +3", rest) and "\n  torch (reference) " in rest


def on_terminal(program: str, columns: int) -> str:
    """What a program writes to a terminal of its own."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(main, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=terminal, stderr=terminal, env=environment(TERM="xterm")
        )
        os.close(terminal)
        written = b""
        with contextlib.suppress(OSError):  # how a terminal without a writer ends
            while chunk := screen.read(65536):
                written += chunk
        assert process.wait(timeout=60) == 0
    return written.decode()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_progress_is_one_line_that_goes_away(columns):
    """In a terminal of its own, what is left of a progress bar is nothing, and no line is ever wrapped."""
    program = (
        "from moectl.cli.output import Output\n"
        "import time\n"
        "with Output('convert').progress('converting') as progress:\n"
        "    for n in range(1, 9):\n"
        "        progress(n * 10**9, 8 * 10**9, f'layer {n}, a long name of what is worked on now')\n"
        "        time.sleep(0.06)\n"
    )
    text = on_terminal(program, columns)
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for part in re.split(r"[\r\n]+", text)]
    assert any("converting" in line for line in drawn) and max(map(len, drawn)) <= columns
    assert text.count("\n") <= 1 and "\x1b[2K" in text


def test_rows_are_printed_above_the_progress_bar():
    """Each row takes the place of the bar, which is drawn again below it: no bar is left between rows."""
    program = (
        "from moectl.cli.output import Output\n"
        "import time\n"
        "out = Output('bench')\n"
        "with out.progress('measuring', unit='rows') as progress:\n"
        "    for n in range(4):\n"
        "        progress(n, 4, 'a case')\n"
        "        time.sleep(0.15)\n"
        "        out.draw(lambda console: console.print(f'row {n}', markup=False, soft_wrap=True))\n"
        "out.draw(lambda console: console.print('the end'))\n"
    )
    lines = on_terminal(program, 60).replace("\r\n", "\n").split("\n")
    rows = [line for line in lines if "row " in line]
    assert len(rows) == 4 and "the end" in lines[-2]
    # A line is what comes after its last erasure; the bar's end is a line that the next one erases.
    left = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", re.split(r"\x1b\[2K|\r", line)[-1]).strip() for line in lines
    ]
    assert left[:4] == ["row 0", "row 1", "row 2", "row 3"] and left[-2] == "the end"
    assert len(left) == 7 and left[4].startswith("measuring") and "\x1b[1A\x1b[2K" in lines[5]


def environment(**changes: str) -> dict[str, str]:
    removed = ("NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING", "COLUMNS")
    return {name: text for name, text in os.environ.items() if name not in removed} | changes


def test_a_terminal_that_knows_ascii_alone_gets_every_row():
    command = [sys.executable, "-m", "moectl", "bench", "--rows", str(ROWS), "--model", "gpt-oss-20b", "-v"]
    ascii_only = environment(LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    done = subprocess.run(command, env=ascii_only, capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout.isascii() and b"+-" in done.stdout
    assert b"Unicode" not in done.stderr


@pytest.mark.parametrize(
    ("options", "variables", "colored"),
    [
        ((), {}, False),
        ((), {"FORCE_COLOR": "1"}, True),
        ((), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (("--color", "always"), {"NO_COLOR": "1"}, True),
        (("--color", "never"), {"FORCE_COLOR": "1"}, False),
        (("--color", "auto"), {"FORCE_COLOR": "0"}, False),
    ],
)
def test_colour_follows_the_option_then_the_variables(monkeypatch, options, variables, colored):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    text = moectl("bench", "--rows", ROWS, "--model", "gpt-oss-20b", *options).stdout
    assert ("\x1b[1;32m  moectl" in text) == colored
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "  moectl" in plain and "\x1b" not in plain


def test_errors_are_red_where_there_is_colour():
    done = moectl("bench", "--rows", "nowhere.jsonl", "--color", "always", code=2)
    assert "\x1b[1;31merror:\x1b[0m" in done.stderr
    assert "\x1b" not in moectl("bench", "--rows", "nowhere.jsonl", code=2).stderr
    assert (
        "--color must be auto, always or never, got 'red'"
        in moectl("list", "formats", "--color", "red", code=2).stderr
    )
