"""The parts of `scripts/bench_peers` that need no GPU: cells, the processes, the tables, the refusals."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from moectl import models
from moectl import random_layer as cells
from moectl.convert.layout import layout_named
from moectl.kernels.reference import route
from moectl.kernels.runners import RUNNERS
from moectl.problem import Dims, Routing

from .scripts import loaded

script = loaded("bench_peers")

import moe_peers as peers  # noqa: E402
import moe_tables as tables  # noqa: E402
import moe_workers as workers  # noqa: E402

CPU = torch.device("cpu")


def small(model: str) -> cells.RandomLayer:
    problem = replace(models.MODELS[model], dims=Dims(256, 128), experts=12, local_experts=12)
    return cells.RandomLayer(problem, CPU)


def row(column: str, tokens: int, us: float | None, checked: str = "ok", **more: object) -> workers.Row:
    known = workers.Row("m", "mxfp4", "uniform", column, tokens, us, floor_us=10.0, checked=checked)
    return replace(known, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("distribution", ["uniform", "zipf:1.2", "experts:4"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "kimi-k2"])
def test_logits_lead_to_the_ids_and_weights(model: str, distribution: str) -> None:
    problem = replace(small(model).problem, routing=Routing(after_topk=True))
    for routed in cells.routings(problem, 50, distribution, 3, CPU):
        ids, weights = route(routed.logits.float(), problem)
        order, theirs = ids.sort(-1), routed.ids.sort(-1)
        assert torch.equal(order.values, theirs.values)
        assert torch.allclose(weights.gather(1, order.indices), routed.weights.gather(1, theirs.indices))
        if distribution == "experts:4":
            assert routed.ids.unique().numel() == max(4, problem.top_k)


def test_routings_differ_and_repeat() -> None:
    first, again = (cells.routings(small("kimi-k2").problem, 9, "uniform", 2, CPU) for _ in range(2))
    assert torch.equal(first[0].ids, again[0].ids) and not torch.equal(first[0].ids, first[1].ids)


@pytest.mark.parametrize("layout", ["moectl-mtile64", "marlin-mxfp4", "triton-hopper"])
def test_every_layout_holds_the_same_weights(layout: str) -> None:
    layer = small("gpt-oss-20b")
    problem, stored = layer.laid_out(layout)
    some = layer.canonical([3, 11])
    for role, chain in layout_named(layout).chains(problem).items():
        made = stored[role][[3, 11]]
        assert torch.equal(chain.apply(some[role]).view(made.dtype), made)


@pytest.mark.parametrize("model", models.MODELS)
def test_results_are_of_ordinary_size(model: str) -> None:
    layer = small(model)
    x = cells.tokens_of(layer.problem, 6, CPU)
    (routed,) = cells.routings(layer.problem, 6, "uniform", 1, CPU)
    y = layer.reference(x, routed, [0, 5], layer.problem.activation)
    assert y.shape == (2, 256) and 0.05 < float(y.std()) < 5


@pytest.mark.parametrize("column", script.COLUMN_NAMES)
def test_what_is_not_here_is_absent_with_a_reason(column: str) -> None:
    with pytest.raises(peers.Absent, match="needs a CUDA GPU"):
        peers.Column(column, small("gpt-oss-20b"))


def test_every_column_is_a_backend() -> None:
    assert {*script.COLUMN_NAMES, script.MARLIN_IN_PLACE} == set(peers.WAYS)
    assert {way.backend for way in peers.WAYS.values()} <= set(RUNNERS)


WORKER = """
import json, sys
mark = {mark!r}
for unit in json.loads(sys.argv[2])["units"]:
    say = lambda kind, **data: print(mark + json.dumps(dict(data, kind=kind)), flush=True)
    say("about", device="none")
    say("unit")
    if unit["column"] == "marlin":
        say("none", why="absent: not here")
        continue
    for _, tokens in unit["cells"]:
        if unit["column"] == "humming" and tokens == 2:
            print("a last word", flush=True)
            sys.exit(9)
        if unit["column"] == "triton_kernels":
            import time
            time.sleep(60)
        say("row", model=unit["model"], format=unit["format"], routing="uniform", column=unit["column"],
            tokens=tokens, us=1.0, checked="ok")
"""


def test_a_failure_costs_its_own_cells_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(mark=workers.MARK))
    columns = ("humming", "marlin", "triton_kernels", "moectl")
    cells = tuple(("uniform", tokens) for tokens in (1, 2, 3))
    units = [workers.Unit("m", "mxfp4", column, cells) for column in columns]
    seen: list[workers.Row] = []
    command = [sys.executable, str(script)]
    about, rows = workers.run_units(command, units, {}, time.monotonic() + 60, 2, seen.append)
    assert about == {"device": "none"}
    assert [(r.column, r.tokens) for r in seen] == [
        *(("humming", 1), ("humming", 2), ("marlin", 1), ("triton_kernels", 1)),
        *(("moectl", t) for t in (1, 2, 3)),
    ]
    assert [(r.column, r.tokens) for r in rows] == [(c, t) for c in columns for t in (1, 2, 3)]
    notes = {(r.column, r.tokens): r.note for r in rows if r.us is None}
    assert notes["humming", 2] == "its process ended with status 9" and ("humming", 1) not in notes
    assert notes["marlin", 1] == "absent: not here"
    assert notes["triton_kernels", 1] == "no answer in 2 s"
    assert {r.tokens for r in rows if r.column == "moectl" and r.us == 1.0} == {1, 2, 3}
    assert "a last word" in capsys.readouterr().err


def test_the_time_limit_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(mark=workers.MARK))
    units = [workers.Unit("m", "mxfp4", "triton_kernels", (("uniform", 1),)) for _ in range(2)]
    end = time.monotonic() + 1.5
    _, rows = workers.run_units([sys.executable, str(script)], units, {}, end, 30, lambda row: None)
    assert [r.note for r in rows] == ["the time limit was reached", "not reached within the time limit"]


def test_tables_compare_right_results_alone() -> None:
    rows = [
        row("moectl", 1, 20.0, error=1e-3),
        row("marlin", 1, 30.0),
        row("moectl-marlin", 1, 15.0),
        row("humming", 1, 25.0, "not checked", note="random weights"),
        row("moectl", 4, 10.0),
        row("marlin", 4, 5.0, "WRONG"),
        row("humming", 4, 40.0, "not checked"),
        row("moectl", 8, 5.0, "WRONG"),
        row("marlin", 8, 50.0),
        row("moectl", 16, None, "", note="broke"),
        row("marlin", 16, 50.0),
    ]
    text = tables.as_markdown({"device": "G", "bandwidth": 4.3e12, "flops": 7.9e14}, rows)
    assert "| best peer / moectl | 1.25 | 4.00 | - | - |" in text
    assert "| floor / moectl | 0.50 | 1.00 | - | - |" in text
    assert "5.0 (wrong)" in text and "broke" in text
    mean = math.sqrt(1.25 * 4)
    assert f"over 2 cells of uniform routing: {mean:.3f}; moectl is ahead in 2" in text
    assert json.loads(tables.as_json({"device": "G"}, rows))["rows"][0] == asdict(rows[0])
    skewed = [replace(r, routing="zipf:1.2") for r in rows[:2]]
    text = tables.as_markdown({}, rows + skewed)
    assert f"over 2 cells of uniform routing: {mean:.3f}; moectl is ahead in 2" in text
    assert "over 1 cells of zipf:1.2 routing: 1.500; moectl is ahead in 1" in text
    assert f"over 3 cells: {(mean**2 * 1.5) ** (1 / 3):.3f}; moectl is ahead in 3" in text


def test_skewed_routings_may_have_tokens_of_their_own() -> None:
    given = "--models kimi-k2 --columns moectl --tokens 1,8 --routing uniform,zipf:1.2 --skewed-tokens 8,16"
    (unit,) = script.units(script.parser().parse_args(given.split()))
    assert unit.cells == (("uniform", 1), ("uniform", 8), ("zipf:1.2", 8), ("zipf:1.2", 16))
    # Kernels follow from the number of tokens alone.
    (part,) = workers._parts(unit)
    assert part.cells == (("uniform", 1), ("uniform", 8), ("zipf:1.2", 16))
    given = given.replace("--skewed-tokens 8,16", "")
    (unit,) = script.units(script.parser().parse_args(given.split()))
    assert {tokens for routing, tokens in unit.cells if routing != "uniform"} == {1, 8}


def test_expected_results_are_those_of_the_first_routing() -> None:
    layer = small("qwen3-30b")
    activation = layer.problem.activation
    rows, expected = workers._expected(layer, "uniform", 9, activation)
    x, sets = workers._inputs(layer.problem, CPU, "uniform", 9, 4)
    assert rows[0] == 0 and rows[-1] == 8
    assert torch.equal(layer.reference(x, sets[0], rows, activation), expected)
    other = workers._expected(layer, "uniform", 9, replace(activation, limit=0.1))[1]
    assert not torch.equal(other, expected)
