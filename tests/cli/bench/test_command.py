"""`moectl bench` and `moectl compare` as commands."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moectl.bench.compare_runs import VERDICTS
from support import python_forks
from support.invoking import moectl

ROOT = Path(__file__).resolve().parents[3]

QUICK = ["-m", "1,3", "--repeats", 3, "--device", "cpu", "--warm", "--backend", "torch"]


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    """Rates are measured in one test of their own; here they would only take time."""
    from moectl.problem.roofline import MeasuredRates

    monkeypatch.setattr(
        "moectl.bench.open_bench.measured_rates", lambda device: MeasuredRates(1e10, 1e11, "test")
    )


def test_formats_of_stdout(tiny_gpt_oss):
    document = moectl("bench", tiny_gpt_oss, *QUICK, "--json").document
    assert [(row["backend"], row["tokens"]) for row in document["rows"]] == [("torch", 1), ("torch", 3)]
    assert document["schema_version"] == 2 and document["caches"] == "warm"
    assert document["settings"]["rounds"] == 3 and document["versions"]["torch"]
    assert all(row["ok"] and row["median_us"] > 0 and row["layers"] == "0-1" for row in document["rows"])
    lines = moectl("bench", tiny_gpt_oss, *QUICK, "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", "row", "row"]
    assert moectl("bench", tiny_gpt_oss, *QUICK, "--format", "MD").stdout.startswith("| backend |")
    text = moectl("bench", tiny_gpt_oss, *QUICK).stdout
    rows, _, table = text.partition("\n\n")
    assert [line.split()[2:5] for line in rows.splitlines()] == [
        ["uniform", "M=1", "torch"],
        ["uniform", "M=3", "torch"],
    ], "rows as they come"
    assert re.search(r"backend +roofline +M=1 +3\n  torch \(reference\)", table) and "repack s" not in text
    details = moectl("bench", tiny_gpt_oss, *QUICK, "-v").stdout
    assert "repack s" in details and "not recorded: no NVIDIA GPU" in details and "active experts" in details
    brief = moectl("bench", tiny_gpt_oss, *QUICK, "-q").stdout.splitlines()
    assert [line.split("\t")[4:7] for line in brief] == [["uniform", "torch", "1"], ["uniform", "torch", "3"]]
    assert brief[0].startswith("tiny-gpt-oss\t0-1\t")


def test_files_are_written_resumed_shown_again_and_compared(tiny_gpt_oss, tmp_path):
    rows, table, values, picture = (tmp_path / f"rows.{kind}" for kind in ("jsonl", "md", "csv", "svg"))
    asked = ["bench", tiny_gpt_oss, *QUICK, "-o", rows]
    assert moectl(*asked, "-o", table, "-o", values, "--plot", picture).stdout == ""
    assert [row["tokens"] for row in csv.DictReader(values.open())] == ["1", "3"]
    assert table.read_text().startswith("| backend |") and "<svg" in picture.read_text()
    assert "--resume" in moectl(*asked, code=2).stderr
    kept = rows.read_text()
    rows.write_text("".join(kept.splitlines(keepends=True)[:2]))
    done = moectl(*asked, "--resume")
    assert "1 row of" in done.stderr and rows.read_text().count("\n") == 3
    first, second = (json.loads(line) for line in rows.read_text().splitlines()[1:])
    assert (first["tokens"], second["tokens"]) == (1, 3)
    assert first["median_us"] == json.loads(kept.splitlines()[1])["median_us"]
    other = moectl("bench", tiny_gpt_oss, *QUICK, "--seed", 3, "-o", rows, "--resume", code=2)
    assert "--seed is 3, was 0" in other.stderr
    shown = moectl("bench", "--rows", rows, "--format", "csv")
    assert len(list(csv.DictReader(io.StringIO(shown.stdout)))) == 2
    assert moectl("compare", rows, rows, "--json").document["counts"] == {"same": 2}
    head, first, second = rows.read_text().splitlines(keepends=True)
    early, late = tmp_path / "early.jsonl", tmp_path / "late.jsonl"
    for path, us in ((early, 100.0), (late, 250.0)):
        steady = json.loads(second) | {"median_us": us, "q1_us": us - 1, "q3_us": us + 1}
        path.write_text(head + first + json.dumps(steady) + "\n")
    done = moectl("compare", early, late, code=1)
    assert "1 slower, 1 same" in done.stdout and "2.500" in done.stdout
    assert "1 faster" in moectl("compare", late, early).stdout


def test_a_killed_bench_keeps_its_rows(tiny_gpt_oss, tmp_path):
    rows = tmp_path / "rows.jsonl"
    counts = ",".join(map(str, range(1, 200)))
    options = ["-m", counts, *map(str, QUICK[2:]), "-o", str(rows)]
    with (tmp_path / "said").open("wb") as said:
        command = ["-m", "moectl", "bench", tiny_gpt_oss, *options]
        process = python_forks.start(command, said, said, cwd=tmp_path)
    end = time.monotonic() + 120
    try:
        while not rows.exists() or rows.read_text().count("\n") < 4:
            assert time.monotonic() < end
            os.kill(process.pid, 0)
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    from moectl.bench.read_rows import read_rows

    found = read_rows(rows).rows
    assert len(found) >= 3 and [row.tokens for row in found] == list(range(1, len(found) + 1))
    assert all(row.timed for row in found)
    # Other counts are added to them.
    counts = ["-m", f"1,{len(found) + 500}", *QUICK[2:]]
    done = moectl("bench", tiny_gpt_oss, *counts, "-o", rows, "--resume", "--json").document
    assert [row["tokens"] for row in done["rows"]] == [*range(1, len(found) + 1), len(found) + 500]
    assert done["settings"]["tokens"][-1] == len(found) + 500


def test_files_instead_of_the_table_are_said_in_a_line(tiny_gpt_oss, tmp_path):
    rows, table = tmp_path / "some rows.jsonl", tmp_path / "rows.md"
    done = moectl("bench", tiny_gpt_oss, *QUICK, "-o", rows, "-o", table)
    said = f"2 rows in {rows}, {table}; moectl bench --rows '{rows}' shows them"
    assert done.stdout == "" and said in done.stderr
    done = moectl("bench", tiny_gpt_oss, *QUICK, "-o", table, "-q")
    assert done.stdout == f"{table}\n" and done.stderr == ""
    assert "instead of stdout" in moectl("bench", "--help").words


def test_a_backend_that_cannot_serve_is_a_row_beside_others(tiny_gpt_oss):
    asked = ("bench", tiny_gpt_oss, *QUICK, "--backend")
    found = moectl(*asked, "moectl,torch", "--json").document["rows"]
    assert [(row["backend"], row["refused"]) for row in found if row["tokens"] == 1] == [
        ("moectl", True),
        ("torch", False),
    ]
    assert "SM80" in found[0]["reason"]
    for alone in ("moectl", "moectl,humming"):
        assert "SM80" in moectl(*asked, alone, code=3).stderr


@pytest.mark.parametrize(
    ("typed", "own"), [("Triton-Marlin", "moectl_marlin"), ("torch,triton_marlin", "moectl_marlin")]
)
@pytest.mark.parametrize("command", ["bench", "run"])
def test_the_former_name_of_an_own_backend_is_answered_with_its_name(tiny_gpt_oss, command, typed, own):
    done = moectl(command, tiny_gpt_oss, "--backend", typed, "--device", "cpu", code=2)
    assert f"moectl's own backend is called {own}" in done.stderr and f"next: Give {own}" in done.stderr


def test_named_layers_need_no_checkpoint(monkeypatch):
    from moectl.checkpoint.source import named_layers
    from moectl.problem.moe_problem import Dims

    published = named_layers._published

    def small(entry):
        sizes = {"dims": Dims(128, 128), "experts": 8, "local_experts": 8, "top_k": 2}
        return replace(published(entry), **sizes)

    monkeypatch.setattr(named_layers, "_published", small)
    document = moectl(
        "bench", "--model", "moonshotai/Kimi-K2-Thinking,qwen3-30b", *QUICK, "--backend", "torch", "--json"
    ).document
    assert [(row["model"], row["tokens"], row["ok"]) for row in document["rows"]] == [
        ("kimi-k2", 1, True),
        ("kimi-k2", 3, True),
        ("qwen3-30b", 1, True),
        ("qwen3-30b", 3, True),
    ]
    asked = moectl("bench", "--model", "kimi-k2:mxfp4", *QUICK, "--backend", "torch", "--json").document
    assert {(row["model"], row["scheme"]) for row in asked["rows"]} == {
        ("kimi-k2", "mxfp4 group 32, a16 activations")
    }
    formats = ["deepseek-v3", *(f"kimi-k2:{format}" for format in ("bf16", "fp8-block", "mxfp8", "nvfp4"))]
    words = ("bench", "--model", ",".join(formats), *QUICK, "-m", 1, "--backend", "torch", "--json")
    asked = moectl(*words).document
    assert all(row["ok"] for row in asked["rows"] if not row["refused"])
    assert {row["scheme"] for row in asked["rows"] if row["ok"]} == {
        "fp8 block 128x128, fp8 dynamic activations",
        "bf16, a16 activations",
        "mxfp8 group 32, mxfp8 dynamic activations",
        "nvfp4 group 16, nvfp4 dynamic activations",
    }
    assert "Did you mean" in moectl("bench", "--model", "kimi", *QUICK, code=2).stderr
    assert "mxfp4" in moectl("bench", "--model", "kimi-k2:mxfp", *QUICK, code=2).stderr


def test_routings_are_crossed_and_ranks_are_shown(tiny_gpt_oss, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("[0, 1, 2, 3]\n[7, 6, 5, 4]\n[0, 2, 4, 6]\n")
    routings = f"uniform,hot:2:0.9,trace:{trace},router"
    options = ["--routing", routings, "--ep", 2, "--tp", 2]
    document = moectl("bench", tiny_gpt_oss, *QUICK, *options, "--json").document
    assert len(document["rows"]) == 8
    assert {row["routing"] for row in document["rows"]} == set(routings.split(","))
    assert {row["parallel"] for row in document["rows"]} == {"tp2 ep2"}
    traced = [row for row in document["rows"] if row["routing"].startswith("trace")]
    assert [row["experts"] for row in traced] == [4, 4]


def test_converted_folders_tell_what_loading_costs(tiny_gpt_oss, tmp_path):
    moectl("convert", tiny_gpt_oss, tmp_path / "out", "--to", "marlin", "--experts-only")
    document = moectl("bench", tmp_path / "out", *QUICK, "--json").document
    assert all(row["layout"] == "marlin-mxfp4" and row["load_s"] > 0 for row in document["rows"])
    refused = moectl("bench", tmp_path / "out", *QUICK, "--routing", "router", code=2)
    assert "has no router" in refused.stderr


def test_a_wrong_result_is_exit_1(tiny_gpt_oss, monkeypatch):
    from moectl.kernels import tolerance

    strict = tolerance.Tolerance(1e-9, 1e-9, "no bf16 result is that close")
    monkeypatch.setitem(tolerance.TOLERANCES, ("exact", "fp32"), strict)
    done = moectl("bench", tiny_gpt_oss, "-m", "1", "--device", "cpu", "--format", "csv", code=1)
    row = next(csv.DictReader(io.StringIO(done.stdout)))
    assert row["ok"] == "False" and row["median_us"] == "" and "wrong result" in row["reason"]


def test_times_are_kept_for_choices_by_measurement(tiny_gpt_oss):
    from moectl.bench.bench_targets import BenchTarget
    from moectl.bench.open_bench import open_bench
    from moectl.bench.run_bench import Bench
    from moectl.bench.settings import BenchSettings
    from moectl.cache.backend_times_file import known
    from moectl.cli.checkpoint_argument import find_source

    done = moectl(
        "bench", tiny_gpt_oss, *QUICK, "--repeats", 2, "--routing", "uniform,balanced", "--save", "--json"
    )
    assert "saved in" in done.stderr
    source = find_source(str(tiny_gpt_oss), None, offline=True)
    opened: Bench = open_bench(BenchSettings(checkpoint=str(tiny_gpt_oss), device="cpu"), source)
    target: BenchTarget = opened.targets[0]
    found = known(opened.machine.device, target.problem)
    kept = {(row.backend, row.tokens, row.routing, row.cold): row.us for row in found.measured.rows}
    assert kept == {
        ("torch", row["tokens"], row["routing"], False): row["median_us"] for row in done.document["rows"]
    }
    assert not found.notes and len(kept) == 4
    # Two rounds are too few for a spread: nothing is preferred by them.
    assert all(row.spread_us == row.us for row in found.measured.rows)


def test_compiling_says_what_was_run(tiny_gpt_oss):
    done = moectl("bench", tiny_gpt_oss, *QUICK, "--compile-only", "--jobs", 2, "--json")
    said = "\n".join(done.document["lines"])
    assert "torch M=1: " in said and "torch M=3: " in said and "status" not in said


def test_compiling_fails_where_a_part_does():
    asked = ("--model", "gpt-oss-20b", "--backend", "humming", "--device", "cpu")
    done = moectl("bench", *asked, "--compile-only", code=1)
    assert "part 1 of 1 failed with status 3" in done.words


def test_compiling_stops_what_it_has_started_when_a_part_cannot_start(monkeypatch):
    from moectl.bench import precompile
    from moectl.bench.settings import BenchSettings
    from moectl.errors import Unavailable

    started = []
    popen = subprocess.Popen

    def start(command, **named):
        if started:
            raise OSError(12, "Cannot allocate memory")
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **named))
        return started[0]

    monkeypatch.setattr(precompile.subprocess, "Popen", start)
    asked = precompile.BenchToCompile(BenchSettings(models=("kimi-k2",), tokens=(1,)))
    with pytest.raises(Unavailable, match="part 2 of 3 cannot be started: Cannot allocate memory"):
        list(precompile.compile_parts([asked], 3))
    assert started[0].poll() == -signal.SIGKILL


def test_a_part_that_ends_before_it_is_told_its_work_is_a_part_that_fails(monkeypatch):
    from moectl.bench import precompile
    from moectl.bench.settings import BenchSettings

    popen = subprocess.Popen

    def start(command, **named):
        process = popen([sys.executable, "-c", "import sys; sys.exit(7)"], **named)
        process.wait()
        return process

    monkeypatch.setattr(precompile.subprocess, "Popen", start)
    asked = precompile.BenchToCompile(BenchSettings(models=("kimi-k2",), tokens=(1,)))
    (line,) = precompile.compile_parts([asked], 1)
    assert line.failed and line.text == "part 1 of 1 failed with status 7"


def test_a_layer_that_cannot_be_prepared_is_a_part_that_fails(tiny_gpt_oss, monkeypatch, tmp_path):
    from moectl.bench.precompile import BenchToCompile, CompileJob, run_job
    from moectl.bench.settings import BenchSettings
    from moectl.cli.checkpoint_argument import find_source

    def failing(*given, **named):
        raise RuntimeError("no such instruction")

    settings = BenchSettings(checkpoint=str(tiny_gpt_oss), tokens=(1,), backends=("torch",), device="cpu")
    source = find_source(str(tiny_gpt_oss), None, offline=True)
    job = CompileJob([BenchToCompile(settings, source)], 0, str(tmp_path))
    monkeypatch.setattr("moectl.bench.compile_units.prepare_kernels", failing)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(pickle.dumps(job))))
    with pytest.raises(SystemExit, match="1"):
        run_job()


def test_rows_in_the_documents_have_no_failures_and_a_cut_line_is_noted(tmp_path):
    from moectl.bench.read_rows import read_rows

    there = ROOT / "docs" / "bench_h200.jsonl"
    rows = read_rows(there).rows
    assert not [row for row in rows if row.failed]
    refused = {(row.backend, row.scheme.partition(" ")[0]) for row in rows if row.refused}
    assert ("triton_kernels", "int4") in refused
    assert refused <= {(backend, "int4") for backend in ("triton_kernels", "flashinfer_cutlass")}
    cut = tmp_path / "cut.jsonl"
    cut.write_text(there.read_text()[:-10])
    assert "is incomplete" in moectl("bench", "--rows", cut).stderr
    assert "B: the last line" in moectl("compare", there, cut, code=1).words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "named models, and neither was given"),
        (("x", "--model", "kimi-k2"), "named models, and both were given"),
        (("--rows", "rows.jsonl", "ckpt"), "measures new ones"),
        (("--rows", "a.jsonl", "--rows", "b.jsonl"), "shows one file, got 2"),
        (("--rows", "a.jsonl", "--tp", "4", "--resume"), "--tp, --resume would be ignored"),
        (
            ("--model", "kimi-k2", "--layer", "9", "--activation", "x"),
            "--layer, --activation would be ignored",
        ),
        (("--model", "kimi-k2", "--jobs", "2"), "--jobs needs --compile-only"),
        (("--model", "kimi-k2", "--compile-only", "--save"), "--save would be ignored"),
        (("--model", "kimi-k2", "--compile-only", "--resume"), "--resume would be ignored"),
        (("--model", "kimi-k2", "--compile-only", "-o", "a.md"), "--output would be ignored"),
        (("--model", "kimi-k2", "--compile-only", "--plot", "a.svg"), "--plot would be ignored"),
        (("--model", "kimi-k2", "--resume"), "Give -o FILE.jsonl"),
        (("--model", "kimi-k2", "-o", "rows.xlsx"), "names no format"),
        (("--model", "kimi-k2", "--plot", "rows.pdf"), "is not that of an image"),
        (("--model", "kimi-k2", "--json", "--format", "md"), "two formats"),
        (("--model", "kimi-k2", "--routing", "often"), "not known"),
        (("--model", "kimi-k2", "-m", "0"), "from 1 to"),
        (("--model", "kimi-k2", "-m", "1,64-8"), "go up from A to B in A-B, got '64-8'"),
        (("--model", "kimi-k2", "--tp", "91", "--device", "cpu"), "tensor-parallel"),
        (("--model", "kimi-k2", "--routing", "router", "--device", "cpu"), "has no router"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_work(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in moectl("bench", *options, code=2).stderr


def test_commands_start_without_torch():
    code = "import sys; import moectl.cli.bench.command, moectl.cli.compare; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "False"


def test_every_verdict_is_explained():
    told = moectl("compare", "--help", env={"TERMINAL_WIDTH": "100"}).stdout
    docs = (ROOT / "docs/bench.md").read_text().partition("## Compare")[2].lower()
    for word, meaning in VERDICTS.items():
        assert f" {word} {meaning} " in f" {' '.join(told.split())} ", word
        assert f"*{word}*" in docs, word
    assert re.search(r"exit code 1: slower, failing, missing", told)


@pytest.mark.parametrize(
    "title", [{"title": "triton (OpenAI triton_kernels)"}, {}], ids=["told", "of an older file"]
)
def test_what_an_engine_would_choose_is_in_the_document(tmp_path, title):
    """Whatever the machine: on a CPU that the engine has no kernels for there is nothing to tell."""
    head, *rows = (ROOT / "docs" / "bench_h200.jsonl").read_text().splitlines()
    layer = {key: json.loads(rows[0])[key] for key in ("model", "layers", "scheme", "parallel")}
    pick = {**layer, "backend": "triton_kernels", **title}
    there = tmp_path / "rows.jsonl"
    there.write_text("\n".join([json.dumps({**json.loads(head), "engine_picks": [pick]}), *rows]))
    assert moectl("bench", "--rows", there, "--json").document["engine_picks"] == [pick]


def test_a_tactic_that_was_not_told_is_no_change(tmp_path):
    there, untold = ROOT / "docs" / "bench_h200.jsonl", tmp_path / "untold.jsonl"
    text = there.read_text()
    assert text.count("chosen by its tuner") == text.count("chosen by the library") == 28
    untold.write_text(re.sub('"chosen by [^"]*"', '""', text))
    for pair in ((there, untold), (untold, there)):
        assert "->" not in moectl("compare", *pair, "-v").stdout
    untold.write_text(text.replace("chosen by the library", "tile 8"))
    assert "tile 8 -> chosen by the library" in moectl("compare", untold, there, "-v").stdout
