"""The parts of `scripts/bench_peers` that need no GPU: what is asked for, the processes, the tables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moectl.bench.bench_rows import BenchRow, CompileOutcome
from moectl.bench.compile_units import case_name
from moectl.bench.precompile import BenchToCompile
from moectl.bench.read_rows import read_rows
from moectl.bench.settings import BenchSettings
from moectl.errors import MoectlError
from moectl.kernels.registry import RUNNERS
from moectl.problem.roofline import MeasuredRates
from support.scripts import SCRIPTS, loaded

script = loaded("bench_peers")

import moe_tables as tables  # noqa: E402
import moe_workers as workers  # noqa: E402


def asked(line: str) -> list[workers.Part]:
    return script.parts(script.parser().parse_args(line.split()))


def test_every_column_is_a_backend() -> None:
    assert set(tables.COLUMNS.values()) <= set(RUNNERS)
    assert set(script.TIMED) < set(tables.COLUMNS)


def test_other_routings_may_have_tokens_of_their_own() -> None:
    line = "--models kimi-k2 --columns moectl,marlin --tokens 1,8 --routing uniform,zipf:1.2,experts:4"
    uniform, skewed = asked(f"{line} --skewed-tokens 8,16")
    assert uniform.settings.backends == ("moectl", "marlin")
    assert [(row.backend, row.tokens) for row in uniform.rows] == [
        *(("moectl", 1), ("marlin", 1), ("moectl", 8), ("marlin", 8)),
    ]
    cells = {(row.routing, row.tokens) for row in skewed.rows}
    assert cells == {(name, tokens) for name in ("zipf:1.2", "experts:4") for tokens in (8, 16)}
    # Kernels follow from the number of tokens alone: what is compiled beforehand needs every one once.
    merged = workers.merged_settings([uniform, skewed])
    assert merged.tokens == (1, 8, 16) and merged.routings == ("uniform", "zipf:1.2", "experts:4")
    assert {row.tokens for row in asked(line)[1].rows} == {1, 8}


def test_formats_are_told_apart() -> None:
    (part,) = asked("--models qwen3-30b,gpt-oss-20b --formats mxfp4,int4-g128 --columns moectl --tokens 1")
    assert part.settings.models[:2] == ("qwen3-30b:mxfp4", "qwen3-30b:int4-g128")
    assert len({row.key for row in part.rows}) == 4 and {row.model for row in part.rows} == {
        "qwen3-30b",
        "gpt-oss-20b",
    }
    (part,) = asked("--models qwen3-30b,gpt-oss-20b --columns moectl --tokens 1")
    assert part.settings.models == ("qwen3-30b:int4-g128", "gpt-oss-20b:mxfp4")


WORKER = f"""
import json, os, sys
sys.path[:0] = [{str(SCRIPTS)!r}, {str(SCRIPTS.parent)!r}]
from dataclasses import replace
from moectl.checkpoint.source import named_layers
from moectl.kernels import registry
from moectl.problem.moe_problem import Dims

published, sizes = named_layers._published, dict(dims=Dims(64, 32), experts=8, local_experts=8, top_k=2)
named_layers._published = lambda entry: replace(published(entry), **sizes)
assert named_layers.named_layer("qwen3-30b:mxfp4")[1].experts == 8
torch_runner = registry.runner_for("torch")

def fails(run, *, at):
    def compute(prepared, x, ids, weights):
        if len(x) == at:
            run()
        return torch_runner.compute(prepared, x, ids, weights)
    return compute

def hangs():
    import time
    time.sleep(600)

for name, run, at in (("crashes", lambda: os._exit(9), 2), ("hangs", hangs, 5)):
    globals()[name + "_runner"] = replace(torch_runner, name=name, compute=fails(run, at=at))
    registry.RUNNERS[name] = registry.RunnerEntry("__main__:" + name + "_runner")
import moectl.bench.run_bench
from moectl.run import BackendChoice
moectl.bench.run_bench.choose_backends = lambda problem, machine, names, stored: BackendChoice(tuple(names))
from moe_workers import work
sys.exit(work(json.load(sys.stdin)))
"""


def watch_of(
    tmp_path: Path, backends: Sequence[str], tokens: Sequence[int], **limits: float
) -> workers.Watch:
    """A watch of a small layer on the CPU, with runners that crash at 2 tokens and hang at 5."""
    (tmp_path / "worker.py").write_text(WORKER)
    part = workers.Part.of(
        BenchSettings(
            models=("qwen3-30b:mxfp4",),
            tokens=tuple(tokens),
            backends=tuple(backends),
            device="cpu",
            rounds=3,
        )
    )
    command = [sys.executable, str(tmp_path / "worker.py")]
    end = time.monotonic() + limits.get("seconds", 200)
    limit = limits.get("cell_limit", 100)
    return workers.Watch(
        command, [part], MeasuredRates(1e10, 1e12, "given"), end, limit, lambda about: None, lambda row: None
    )


@pytest.mark.slow
def test_what_crashes_or_hangs_costs_its_own_cell_alone(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, ("torch", "crashes", "hangs"), (1, 2, 5), cell_limit=12)
    rows = watch.run()
    assert [(row.backend, row.tokens) for row in rows] == [
        (name, tokens) for tokens in (1, 2, 5) for name in ("torch", "crashes", "hangs")
    ]
    reasons = {(row.backend, row.tokens): row.reason for row in rows if not row.timed}
    assert reasons == {
        ("crashes", 2): "its process ended with status 9",
        ("hangs", 5): "no answer in 12 s",
    }
    assert all(row.ok and row.floor_us for row in rows if row.timed)
    assert watch.about["rates"] == {"bandwidth": 1e10, "flops": 1e12, "source": "given", "fp8_flops": 0.0}


@pytest.mark.slow
def test_the_time_limit_keeps_what_was_measured(tmp_path: Path) -> None:
    rows = watch_of(tmp_path, ("torch", "hangs"), (1, 5, 7), seconds=15).run()
    assert [row.timed for row in rows] == [True, True, False, False, False, False]
    assert {row.reason for row in rows[2:]} == {workers.NOT_REACHED}


STUB = """
import json, sys
order, mark = json.load(sys.stdin), {mark!r}
say = lambda kind, **data: print(mark + json.dumps(dict(data, kind=kind)), flush=True)
{body}
"""


def stub(tmp_path: Path, body: str, columns: str) -> list[BenchRow]:
    (tmp_path / "stub.py").write_text(STUB.format(mark=workers.MARK, body=body))
    todo = asked(f"--models qwen3-30b --tokens 1 --columns {columns}")
    command = [sys.executable, str(tmp_path / "stub.py")]
    return workers.Watch(
        command, todo, None, time.monotonic() + 60, 50, lambda about: None, lambda row: None
    ).run()


def test_a_gpu_that_a_backend_has_broken_costs_the_others_nothing(tmp_path: Path) -> None:
    """The row of who broke it was said; the others of the cell are measured by the next worker."""
    row = BenchRow(
        "qwen3-30b", "-", 0, "int4 group 128, a16 activations", "marlin", 1, "uniform", reason="bad"
    )
    key = list(row.key)
    body = f"""
say("begin", keys=[{key!r}, {[*key[:3], "humming", *key[4:]]!r}])
row = dict({row.to_json()!r})
if order["done"]:
    row.update(backend="humming", reason="", median_us=5.0, ok=True)
say("row", row=row)
sys.exit(0 if order["done"] else 3)
"""
    first, second = stub(tmp_path, body, "marlin,humming")
    assert (first.backend, first.reason, second.backend, second.median_us) == ("marlin", "bad", "humming", 5)


def test_workers_that_come_to_nothing_are_not_started_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = stub(tmp_path, "print('a last word'); sys.exit(7)", "marlin,humming")
    assert {row.reason for row in rows} == {"its process ended with status 7"}
    assert "a last word" in capsys.readouterr().err
    rows = stub(tmp_path, "say('none', bench=0, why='no such library')", "marlin")
    assert [(row.reason, row.refused) for row in rows] == [("no such library", True)]
    assert {row.reason for row in stub(tmp_path, "", "marlin")} == {"its process reported no result"}


def test_rows_are_in_the_file_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed keeps them: the file is one of a bench from its first line on."""
    file, seen = tmp_path / "rows.jsonl", []

    class Told:
        about: Mapping[str, object] = {"device": "G"}

        def __init__(self, *arguments: Any, costs: bool) -> None:
            self.begin, self.report = arguments[-2:]

        def run(self) -> list[BenchRow]:
            self.begin({"device": "G"})
            for tokens in (1, 4):
                self.report(row("marlin", tokens, 5.0))
                seen.append(len(read_rows(file).rows))
            return list(read_rows(file).rows)

    monkeypatch.setattr(script, "Watch", Told)
    monkeypatch.setattr(sys, "argv", ["bench_peers", "--json", str(file)])
    assert script.main() == 0 and seen == [1, 2]
    assert read_rows(file).about["device"] == "G"


def row(column: str, tokens: int, us: float | None, **more: object) -> BenchRow:
    known = BenchRow(
        "m", "-", 0, "mxfp4 group 32, a16 activations", tables.COLUMNS[column], tokens, "uniform"
    )
    timed = replace(known, median_us=us, floor_us=10.0, ok=us is not None, error_rms=1e-3, experts=4.0)
    return replace(timed, floor_percent=us and 1e3 / us, **more)  # type: ignore[arg-type]


def test_tables_compare_right_results_alone() -> None:
    rows = [
        row("moectl", 1, 20.0),
        row("marlin", 1, 30.0),
        row("moectl_marlin", 1, 15.0),
        row("humming", 1, 25.0, throttled="power cap"),
        row("moectl", 4, 10.0),
        row("marlin", 4, None, ok=False, reason="wrong result: token 0 of call 0 is off by 1 (RMS)"),
        row("humming", 4, 40.0),
        row("moectl", 8, None, ok=False, reason="wrong result: token 1 of call 0 is off by 1 (RMS)"),
        row("marlin", 8, 50.0),
        row("moectl", 16, None, ok=None, reason="broke"),
        row("marlin", 16, 50.0),
    ]
    about = {"device": "G", "versions": {"moectl": "1"}}
    text = tables.as_markdown(about, rows)
    assert "### m, mxfp4 group 32, 16-bit activations, uniform routing" in text
    assert "| best peer / moectl | 1.25 | 4.00 | - | - |" in text
    assert "| active experts | 4.00 | 4.00 | 4.00 | 4.00 |" in text
    assert "| roofline | 10.0 | 10.0 | 10.0 | 10.0 |" in text
    assert "| moectl_marlin | 15.0 | - | - | - |" in text, "shown, and no peer"
    assert "| moectl | 20.0 | 10.0 | wrong | failed |" in text
    assert "| roofline / moectl | 0.50 | 1.00 | - | - |" in text
    assert "| marlin | 30.0 | wrong | 50.0 | 50.0 |" in text and "broke" in text
    assert "clocks throttled at M = 1" in text and "largest relative error 1.0e-03" in text
    mean = math.sqrt(1.25 * 4)
    assert f"over 2 cases with uniform routing: {mean:.3f}; moectl is ahead in 2" in text
    skewed = [replace(r, routing="zipf:1.2") for r in rows[:2]]
    text = tables.as_markdown({}, rows + skewed)
    assert f"over 2 cases with uniform routing: {mean:.3f}; moectl is ahead in 2" in text
    assert "over 1 cases with zipf:1.2 routing: 1.500; moectl is ahead in 1" in text
    assert f"over 3 cases: {(mean**2 * 1.5) ** (1 / 3):.3f}; moectl is ahead in 3" in text
    assert "nothing was timed (broke)" in tables.as_markdown({}, rows[-2:-1])
    refused = [row("moectl", 1, 5.0), row("marlin", 1, None, ok=None, refused=True, reason="no kernel")]
    assert "- marlin: no kernel" in tables.as_markdown({}, refused)


PLAN = """{"about": "two layers", "layers": [
 {"model": "qwen3-30b:bf16", "tokens": {"moectl": "1,8", "triton": "8"}},
 {"model": "deepseek-v3", "ep": 8, "dispatched": true, "tokens": {"humming": "1-16*4", "moectl": "1"}}
]}"""


def plan_in(tmp_path: Path, text: str = PLAN) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(text)
    return path


def test_a_plan_names_tokens_by_layer_and_backend(tmp_path: Path) -> None:
    first, second = asked(f"--plan {plan_in(tmp_path)} --repeats 5")
    assert first.settings.backends == ("moectl", "triton") and first.settings.rounds == 5
    assert [(row.backend, row.tokens) for row in first.rows] == [("moectl", 1), ("moectl", 8), ("triton", 8)]
    assert {(key[3], key[4]) for key in first.left_out} == {("triton", 1)}
    assert {row.parallel for row in second.rows} == {"ep8 dispatched"}
    assert {(row.backend, row.tokens) for row in second.rows} == {
        *(("humming", 1), ("humming", 4), ("humming", 16), ("moectl", 1)),
    }
    merged = workers.merged_settings([first, second])
    assert merged.tokens == (1, 4, 8, 16) and (merged.ep, merged.dispatched) == (1, False)
    assert merged.models == ("qwen3-30b:bf16", "deepseek-v3")
    (only,) = asked(f"--plan {plan_in(tmp_path)} --columns triton,marlin")
    assert [(row.model, row.backend, row.tokens) for row in only.rows] == [("qwen3-30b", "triton", 8)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "object"),
        ("{}", "has no list of layers"),
        ('{"layers": [{"model": "kimi-k2"}]}', "layer 1 .* must be an object with model and tokens"),
        (
            '{"layers": [{"model": "kimi-k2", "tokens": {"cuda": "1"}}]}',
            "no column is called 'cuda' in",
        ),
        ('{"layers": [{"model": "kimi-k2", "tokens": {"moectl": [1]}}]}', "a string such as 1,8,64-1024"),
        ('{"layers": [{"model": "kimi-k2", "tokens": {"moectl": "x"}}]}', "token counts must look like"),
        ('{"layers": [{"model": "kimi-k2", "tp": "8", "tokens": {}}]}', "tp in layer 1 .* must be a int"),
        ('{"layers": [{"model": "kimi-k2", "pp": 8, "tokens": {}}]}', "pp in layer 1 .* one of model, tp"),
        ('{"layers": [{"model": "gpt-5", "tokens": {"moectl": "1"}}]}', "no built-in model"),
        ('{"layers": [{"model": "kimi-k2", "tokens": {"marlin": "1"}}]}', "has none of the columns moectl"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(MoectlError, match=words):
        asked(f"--plan {plan_in(tmp_path, text)} --columns moectl,triton,humming")
    with pytest.raises(MoectlError, match=r"plan .*missing.json"):
        asked(f"--plan {tmp_path / 'missing.json'}")


def test_the_plans_here_name_layers_and_backends_that_there_are() -> None:
    for path in (SCRIPTS / "plans").glob("*.json"):
        parts = asked(f"--plan {path}")
        assert len({row.key for part in parts for row in part.rows}) == sum(len(part.rows) for part in parts)
        for part in parts:
            assert {row.tokens for row in part.rows if row.backend == "moectl"} == set(part.settings.tokens)


def test_a_plan_s_cells_alone_are_measured(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, ("torch", "crashes"), (1, 2))
    watch.parts = [workers.Part.of(watch.parts[0].settings, {"torch": (1, 2), "crashes": (1,)})]
    watch.costs = False
    rows = watch.run()
    assert [(row.backend, row.tokens, row.timed) for row in rows] == [
        *(("torch", 1, True), ("crashes", 1, True), ("torch", 2, True)),
    ]
    assert {row.costs.weight_bytes for row in rows} == {None}


def test_what_was_not_compiled_is_left_out_with_the_reason(tmp_path: Path) -> None:
    parts = asked(f"--plan {plan_in(tmp_path)}")
    first, second = ([case_name(row) for row in part.rows] for part in parts)
    assert second[0] == "deepseek-v3 ep8 dispatched - fp8 block 128x128 humming M=1"
    reasons = {first[0]: "", first[1]: "RuntimeError: no nvcc", first[2]: ""}
    (kept,), late = workers.without_uncompiled(parts, reasons)
    assert [(row.backend, row.tokens) for row in kept.rows] == [("moectl", 1), ("triton", 8)]
    assert {(key[3], key[4]) for key in kept.left_out} == {("triton", 1), ("moectl", 8)}
    assert late[0].reason == "RuntimeError: no nvcc"
    assert {row.reason for row in late[1:]} == {workers.NOT_COMPILED} and len(late) == 5


def test_a_layer_that_all_columns_refuse_is_not_said_to_be_late() -> None:
    """Nothing is compiled for it; the measurement says why, as for a layer that some refuse."""
    (part,) = asked("--models kimi-k2 --columns humming,cutlass --tokens 1,8")
    part = replace(part, settings=replace(part.settings, device="cpu"))
    _, reasons = workers.compiled([part], 1, 120)
    assert reasons == {case_name(row): "" for row in part.rows} and len(reasons) == 4
    assert workers.without_uncompiled([part], reasons) == ([part], [])


def test_kernels_are_compiled_for_a_plan_s_cells_until_time_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = asked(f"--plan {plan_in(tmp_path)}")
    given = []

    def lines(benches: Sequence[BenchToCompile], processes: int) -> Iterator[CompileOutcome]:
        given.extend(benches)
        yield CompileOutcome(f"{case_name(parts[0].rows[0])}: 1.5 s")
        yield CompileOutcome("part 1 of 2 failed with status 9", failed=True)
        time.sleep(20)

    monkeypatch.setattr(workers, "compile_parts", lines)
    assert workers.compiled(parts, 2, 0.3) == (False, {case_name(parts[0].rows[0]): ""})
    assert [(one.settings, one.done) for one in given] == [(part.settings, part.left_out) for part in parts]
    assert "not everything was compiled after 0 s" in capsys.readouterr().out


def test_cells_are_lines_with_the_best_peer_and_what_failed() -> None:
    rows = [
        row("moectl", 1, 20.0, tactic="tile 8", parallel="tp8"),
        row("marlin", 1, 30.0, parallel="tp8"),
        row("humming", 1, 25.0, parallel="tp8"),
        row("moectl", 4, 50.0, parallel="tp8"),
        row("marlin", 4, None, ok=False, reason="wrong result", parallel="tp8"),
        row("humming", 4, 40.0, parallel="tp8"),
        row("triton", 1, None, ok=None, refused=True, reason="no kernel", parallel="tp8"),
    ]
    text = tables.as_cells(rows).splitlines()
    case = "m tp8 mxfp4 group 32 1 20.0 25.0 humming 1.25 10.0 ok tile 8"
    assert " ".join(text[1].split()) == case
    assert " 4 50.0 40.0 humming 0.80 " in " ".join(text[2].split())
    assert "marlin wrong" in text[2]
    assert text[3:] == [
        "m tp8 mxfp4 group 32: geometric mean 1.000",
        "m tp8 mxfp4 group 32: triton: no kernel",
        "all: 1.000 over 2, ahead in 1",
    ]
    assert len(tables.as_cells([]).splitlines()) == 1


def test_the_table_of_a_document_is_that_of_the_rows() -> None:
    """The lines of a layer in docs/bench.md: its times, and the best of others over moectl."""
    found = read_rows(SCRIPTS.parent / "docs" / "bench_h200.jsonl").rows
    rows = [one for one in found if one.routing == "uniform"]
    text = tables.as_published(rows)
    for line in (
        "| layer | M=1 | 4 | 16 | 64 | 256 | 1024 | 4096 | 8192 | mean |",
        "| roofline | 46.1 | 178 | 635 | 1630 | 2205 | 2219 | 3653 | 7307 |  |",
        "| of roofline | 79% | 92% | 96% | 99% | 91% | 70% | 58% | 71% |  |",
        "| marlin | 78.2 | 244 | 845 | 2154 | 3231 | 4831 | 15567 | 24414 |  |",
        "| best of them over moectl | 1.19 | 1.12 | 1.12 | 1.16 | 1.15 | 1.07 | 1.09 | 1.22 | 1.14 |",
    ):
        assert line in text
    assert "over 32 cases with uniform routing: 1.348; moectl is ahead in 32" in tables.means_of(rows)
    cells = tables.as_ratios(rows).splitlines()
    assert cells[0].startswith("| layer |  |") and len({line.count("|") for line in cells}) == 1
    kimi = "| kimi-k2 int4 group 32 | M=1: 58.1 (1.19) | M=4: 193 (1.12) | M=16: 661 (1.12) |"
    assert any(line.startswith(kimi) and line.endswith("M=8192: 10248 (1.22) | 1.14 |") for line in cells)


def test_layers_that_differ_in_their_tokens_are_told_apart() -> None:
    rows = read_rows(SCRIPTS.parent / "docs" / "bench_other_16_and_8_bits_h200.jsonl").rows
    names = [line.split("|")[1].strip() for line in tables.as_ratios(rows).splitlines()[2:]]
    assert len(names) == len(set(names)) == 38
    assert {"qwen3-30b int8 per channel", "qwen3-30b int8 per channel, int8 tokens"} < set(names)
