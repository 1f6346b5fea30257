"""`scripts/bench_first_call`: its processes, their caches and its tables, on a CPU and with stand-ins."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moectl.capabilities.unpacked_libraries import VARIABLE
from moectl.errors import UsageError
from moectl.kernels.registry import RUNNERS
from support.scripts import SCRIPTS, loaded

script = loaded("bench_first_call")

WORKER = f"""
import json, sys
sys.path[:0] = [{str(SCRIPTS)!r}, {str(SCRIPTS.parent)!r}, {str(SCRIPTS.parent / "tests")!r}]
from dataclasses import replace
from moectl.checkpoint.source import named_layers
from moectl.kernels import registry
from moectl.problem.moe_problem import Dims
from support.scripts import loaded

published, sizes = named_layers._published, dict(dims=Dims(64, 64), experts=8, local_experts=8, top_k=2)
named_layers._published = lambda entry: replace(published(entry), **sizes)
torch_runner = registry.runner_for("torch")

def compute(prepared, x, ids, weights):
    if len(x) == 3:
        raise RuntimeError("no kernel for three")
    return torch_runner.compute(prepared, x, ids, weights) * (2 if len(x) == 5 else 1)

odd_runner = replace(torch_runner, name="odd", compute=compute)
registry.RUNNERS["odd"] = registry.RunnerEntry("__main__:odd_runner")
import moectl.bench.run_bench
from moectl.run import BackendChoice
moectl.bench.run_bench.choose_backends = lambda problem, machine, names, stored: BackendChoice(tuple(names))
sys.exit(loaded("bench_first_call").work(json.loads(sys.stdin.readline())))
"""

STUB = """
import json, os, sys, time
from pathlib import Path
order, mark = json.loads(sys.stdin.readline()), {mark!r}
say = lambda kind, **data: print(mark + json.dumps(dict(data, kind=kind)), flush=True)
triton, driver = Path(os.environ["TRITON_CACHE_DIR"]), Path(os.environ["CUDA_CACHE_PATH"])
{body}
"""

COMPILES = """
say("ready", start=2.0, layer=1.5, about={"device": "G", "cores": 4})
sys.stdin.readline()
begin, kernel = time.time(), triton / "key" / "gemm.cubin"
time.sleep(0.3)
if not kernel.exists():
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"code")
    driver.mkdir()
    (driver / "index").write_bytes(bytes(3 << 20))
log = Path(os.environ["MOECTL_CACHE"]).parents[1] / "log"
with log.open("a") as file:
    file.write(json.dumps([order["settings"]["backends"][0], order["ahead"], begin, time.time()]) + "\\n")
say("call", tokens=1, seconds=0.25, rms=1e-3, ok=True)
say("done")
"""


def measured(
    tmp_path: Path, code: str, columns: tuple[str, ...], tokens: tuple[int, ...] = (1,), limit: float = 100
) -> tuple[Any, list[Any]]:
    """The measurement and the rows of one layer in workers with the given code."""
    (tmp_path / "worker.py").write_text(code)
    plans = script.plans_of("qwen3-30b:mxfp4", columns, tokens, "cpu")
    command = [sys.executable, str(tmp_path / "worker.py")]
    run = script.Measurement(command, tmp_path, time.monotonic() + limit, lambda row: None, 0)
    return run, run.run(plans)


def stub(body: str) -> str:
    return STUB.format(mark=script.MARK, body=body)


def test_every_column_is_a_backend() -> None:
    assert set(script.BACKENDS.values()) <= set(RUNNERS)
    assert set(script.TIMED) < set(script.BACKENDS)


def test_layers_and_ranks_are_named() -> None:
    plans = script.plans_of(script.LAYERS, script.TIMED, (1, 64), "cuda")
    assert {plan.layer for plan in plans} == {"gpt-oss-20b", "qwen3-235b:int4-g128 tp4"}
    last = plans[-1].settings
    assert (last.models, last.tp, last.tokens, last.backends) == (
        *(("qwen3-235b:int4-g128",), 4, (1, 64), ("humming",)),
    )
    assert [plan.column for plan in plans if plan.alone] == ["moectl_ahead"] * 2
    for wrong in ("gpt-oss-20b pp2", "gpt-oss-20b tp", "gpt-5", "gpt-oss-20b tp0"):
        with pytest.raises(UsageError):
            script.plans_of(wrong, ("moectl",), (1,), "cuda")


def test_first_calls_of_a_backend_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real workers: results are checked, and what fails or is wrong keeps what was measured before."""
    monkeypatch.setitem(script.BACKENDS, "odd", "odd")
    monkeypatch.setitem(script.BACKENDS, "torch", "torch")
    run, (cold, warm, odd, after) = measured(tmp_path, WORKER, ("torch", "odd"), (2, 5, 3))
    for row in (cold, warm):
        assert list(row.seconds) == [2, 5, 3] and min(row.seconds.values()) > 0, row.reason
        assert row.ok and not row.reason and max(row.error_rms.values()) < 0.02
        assert row.start_s > row.layer_s > 0
    assert list(odd.seconds) == [2, 5] and odd.ok is False
    assert odd.reason == "M=3: RuntimeError: no kernel for three" == after.reason and not after.seconds
    assert run.about["cores"] >= 1 and "torch" in run.about["versions"]
    text = script.as_markdown(run.about, [cold, warm, odd])
    assert "wrong result: M=3: RuntimeError" in text and "| torch | warm |" in text


def test_caches_are_empty_first_and_filled_then(tmp_path: Path) -> None:
    """What is compiled is counted, nobody else's caches are used, and who needs all cores has them."""
    run, rows = measured(tmp_path, stub(COMPILES), ("moectl", "moectl_ahead", "humming"))
    assert [(row.column, row.caches, row.seconds) for row in rows] == [
        (column, caches, {1: 0.25})
        for column in ("moectl", "moectl_ahead", "humming")
        for caches in ("cold", "warm")
    ]
    assert [row.kernels for row in rows] == ["1 Triton, 3 MiB by the driver", "0"] * 3
    assert run.about == {"device": "G", "cores": 4}
    spans = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(span[:2] for span in spans) == sorted(
        [["moectl", False], ["moectl", True], ["humming", False]] * 2
    )
    assert {tuple(span[:2]) for span in spans[:2]} == {("moectl", False), ("humming", False)}
    for i, (*_, begin, end) in enumerate(spans[2:], 2):  # the other four never at once
        assert all(end <= other[2] or other[3] <= begin for k, other in enumerate(spans) if k != i)


@pytest.mark.slow
def test_a_process_that_ends_or_hangs_costs_its_own_row(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = (
        """
if order["settings"]["backends"] == ["humming"]:
    print("the last word")
    sys.exit(9)
if order["settings"]["backends"] == ["marlin"]:
    time.sleep(600)
"""
        + COMPILES
    )
    _, rows = measured(tmp_path, stub(body), ("moectl", "humming", "marlin"), limit=6)
    moectl, _, humming, _, marlin, _ = rows
    assert moectl.seconds == {1: 0.25}
    assert humming.reason == "its process ended with status 9" and marlin.reason == script.NOT_REACHED
    assert "the last word" in capfd.readouterr().err


def test_workers_see_their_own_caches_and_the_same_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = tmp_path / "cache" / "peers"
    peers.mkdir(parents=True)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("MOECTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    env = script.environment(tmp_path / "a")
    for name in ("TRITON_CACHE_DIR", "HUMMING_CACHE_DIR", "CUDA_CACHE_PATH", "MOECTL_CACHE"):
        assert Path(env[name]).is_relative_to(tmp_path / "a")
    assert env[VARIABLE] == str(peers.resolve()) and "CUDA_CACHE_DISABLE" not in env
    assert int(env["CUDA_CACHE_MAXSIZE"]) == 4 << 30


def test_tables_have_what_was_measured() -> None:
    row = script.FirstCalls("gpt-oss-20b", "moectl", "cold", 5.0, 1.0, {1: 8.125, 64: 2.0}, {1: 0.0}, True)
    some = replace(row, column="marlin", caches="warm", seconds={1: 40.0}, reason="no | space", compiled={})
    text = script.as_markdown({"device": "G", "cores": 16}, [replace(row, compiled={"Triton": 7}), some])
    assert "| backend | caches | layer | M=1 | M=64 | all calls | compiled |" in text
    assert "| moectl | cold | 1.00 | 8.12 | 2.00 | 10.1 | 7 Triton |" in text
    assert "| marlin | warm | 1.00 | 40.0 | - | - | no / space |" in text
    assert "16 cores" in text
