"""`scripts/survey_launches` without a GPU: what it draws, which launches it takes, where a run goes on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devtools.launch_binaries import LaunchedCell

from moectl.checkpoint.source import catalogue
from moectl.checkpoint.source.catalogue import model_names
from moectl.environment.named_devices import find_device
from moectl.kernels.triton.offline_gpu import OfflineGpu, standing_in
from moectl.kernels.triton.triton_runner import choose_shipped
from moectl.layer.random_layer import RandomLayer
from support.scripts import loaded

script = loaded("survey_launches")
H200 = OfflineGpu.of(find_device("h200"))
CELL = script.Cell("small", "int4-g32", 256, 192, 16, 16, 2, 5)


@pytest.fixture(scope="module")
def plan() -> Iterator[list]:
    """Of some models, as reading all of them takes seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(catalogue, "model_names", lambda: model_names()[::5])
        yield list(script.drawn(12, 3, ["mxfp4", "int4-g128", "fp8-block"], 4))


def test_a_plan_has_layers_that_exist_once_each_with_its_tokens_and_is_the_same_again(plan: list) -> None:
    assert plan == list(script.drawn(12, 3, ["mxfp4", "int4-g128", "fp8-block"], 4))
    assert len(plan) == 48 and len({cell.layer for cell in plan}) == 12 and len(set(plan)) == 48
    assert {cell.format for cell in plan} == {"mxfp4", "int4-g128", "fp8-block"}
    for cell in plan:
        problem, weight = cell.problem, cell.problem.scheme.weight
        assert 1 <= cell.tokens <= script.MOST_TOKENS and problem.experts % problem.local_experts == 0
        assert not cell.intermediate % 32 and cell.intermediate % min(weight.block[1], 128) == 0
        assert 3 * cell.hidden * cell.intermediate * cell.local_experts * weight.bits / 8 <= script.MOST_BYTES


def test_each_cell_gets_what_runs_today_and_others_that_run(plan: list) -> None:
    work = script.chosen(plan, H200, 5, 1)
    assert [*work] == plan
    with standing_in(H200):
        for cell, launches in work.items():
            assert launches[0] == choose_shipped(cell.problem, cell.tokens, torch.device("cuda"))
            assert 1 <= len(launches) <= 5 and len(set(launches)) == len(launches)
        binaries = [
            binary
            for launch in work[plan[0]]
            for binary in LaunchedCell(plan[0].problem, plan[0].tokens, launch).binaries()
        ]
    assert len({binary.key for binary in binaries}) > 2


def test_layers_in_fp16_are_compiled_for_their_own_tokens() -> None:
    problem = replace(CELL.problem, dtype="fp16")
    with standing_in(H200):
        launch = choose_shipped(problem, 64, torch.device("cuda"))
        assert LaunchedCell(problem, 64, launch).binaries()


def test_launches_are_drawn_of_the_named_families_alone(plan: list) -> None:
    for cell, launches in script.chosen(plan, H200, 20, 1, ("decode", "grouped")).items():
        few = cell.tokens == 1 or cell.tokens * cell.top_k <= 64
        assert {launch.family for launch in launches} == ({"decode", "grouped"} if few else {"grouped"})


def test_repeated_experts_compute_what_the_first_ones_do() -> None:
    layer = script.repeated(CELL.problem, torch.device("cpu"))
    few = replace(CELL.problem, experts=8, local_experts=8)
    first = RandomLayer(few, torch.device("cpu")).experts.prepared("moectl", torch.device("cpu"))
    for role, tensor in layer.weights.items():
        assert torch.equal(tensor, torch.cat([first.weights[role]] * 2)), role


def test_a_run_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    (today, *others) = script.chosen([CELL], H200, 4, 1)[CELL]
    path = tmp_path / "rows.jsonl"
    assert script._tried(path) == set()
    row = {**asdict(CELL), "gpu": "H200", "sms": 132, "family": today.family, "tile": asdict(today.tile)}
    path.write_text(json.dumps(row | {"us": 5.0}) + "\n")
    tried = script._tried(path)
    assert script._key(CELL, today) in tried
    assert not any(script._key(CELL, launch) in tried for launch in others)
    assert script._key(replace(CELL, tokens=6), today) not in tried


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"intermediate": 200}, "line 2 of .* is impossible: intermediate size 200 is not a whole number of"),
        ({"format": "int3"}, "line 2 of .* must have name, format, .*: a known format, and numbers from 1"),
        ({"tokens": 0}, "numbers from 1"),
        ({"hidden": "256"}, "numbers from 1"),
        ({"gpu": "H200"}, "must have name, format"),
    ],
)
def test_an_impossible_layer_of_a_plan_is_refused_before_anything_is_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    said: str,
) -> None:
    plan = tmp_path / "plan.jsonl"
    plan.write_text(json.dumps(asdict(CELL)) + "\n")
    assert script.planned_cells(plan) == [CELL]
    plan.write_text("\n".join(map(json.dumps, [asdict(CELL), asdict(CELL) | change])))
    monkeypatch.setattr(script, "need_a_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["survey_launches", str(plan), "--out", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit) as end:
        script.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and re.search(said, line)


def test_a_plan_is_compiled_for_a_gpu_by_name_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.jsonl"
    plan.write_text(json.dumps(asdict(CELL)) + "\n")
    compiled = []

    def compile_launches(cells: list[Any], gpu: OfflineGpu, jobs: int, limit: float) -> str:
        compiled.extend((cell.tokens, gpu.name, jobs, limit) for cell in cells)
        return "2 binaries"

    monkeypatch.setattr(script, "compile_launches", compile_launches)
    arguments = ["survey_launches", str(plan), "--most", "2", "--jobs", "3", "--compile-limit", "9"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--compile-for", "h200"])
    script.main()
    assert compiled == [(CELL.tokens, "NVIDIA H200", 3, 9.0)] * 2 + [(1, "NVIDIA H200", 3, 9.0)]
    assert "2 binaries in " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--compile-for", "h2oo"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2 and "h2oo" in capsys.readouterr().err
