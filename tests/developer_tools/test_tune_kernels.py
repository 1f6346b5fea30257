"""`scripts/tune_kernels` without a GPU: what it prints and writes of a search."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from devtools.launch_binaries import LaunchedCell

from moectl.environment import find_device
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.portable_launches import Tile
from moectl.kernels.triton.offline_gpu import OfflineGpu, standing_in
from moectl.problem.published_layers import MODELS, model_problem
from moectl.tuning.gpu_bench import GpuBench
from moectl.tuning.launch_search import DeviceBroken, WrongResult
from moectl.tuning.tuning_cases import TuningCase
from support.scripts import loaded

script = loaded("tune_kernels")

LAUNCHES = [Launch("grouped", Tile(16, rows, 64, stages=4, warps=4)) for rows in (64, 128, 192, 256)]
WRONG, SLOW, FAST, CURRENT = LAUNCHES
CELL = TuningCase("qwen3-30b", MODELS["qwen3-30b"], 64)


class Fake:
    """One launch is wrong, and the one that is taken today is no candidate."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def candidates(self, cell: TuningCase) -> list[Launch]:
        return [WRONG, SLOW, FAST]

    def current(self, cell: TuningCase) -> Launch:
        return CURRENT

    def error(self, cell: TuningCase, launch: Launch) -> float:
        if self.broken:
            raise DeviceBroken("gone")
        if launch == WRONG:
            raise WrongResult("off by 3")
        return 1e-3

    def time(self, cell: TuningCase, launch: Launch, repeats: int) -> float:
        return {SLOW: 30.0, FAST: 10.04, CURRENT: 12.0}[launch]


def test_the_fastest_right_launch_is_printed_and_is_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(repeats=3, show=1)
    (row,) = script._tuned(CELL, Fake(), options)
    slower = [{"family": "grouped", "tile": asdict(CURRENT.tile), "ratio": 1.195}]
    assert row == {
        "tokens": 64,
        "family": "grouped",
        "tile": asdict(FAST.tile),
        "us": 10.0,
        "slower": slower,  # but none that takes 30 us
    }
    wrong, best, second = capsys.readouterr().out.splitlines()
    assert wrong.strip().startswith("OUT grouped") and wrong.endswith("off by 3")
    assert "qwen3-30b M=   64      10.0 us" in best and "12.0 us" in second
    with pytest.raises(DeviceBroken):
        script._tuned(CELL, Fake(broken=True), options)


def test_rows_of_other_tokens_and_layers_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    names = ("capability", "sms", "weight", "act", "hidden", "intermediate", "experts", "top_k")
    for model, tokens, us in (("a", 4, 1.0), ("b", 4, 2.0), ("a", 1, 3.0), ("a", 4, 4.0)):
        layer = {"model": model, "rows": [{"tokens": tokens, "us": us}]}
        script._write(path, layer | {name: f"{name} of {model}" for name in names})
    rows = {it["model"]: it["rows"] for it in json.loads(path.read_text())["layers"]}
    assert rows == {
        "a": [{"tokens": 1, "us": 3.0}, {"tokens": 4, "us": 4.0}],
        "b": [{"tokens": 4, "us": 2.0}],
    }


def test_rows_of_the_same_weights_with_other_tokens_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    same = dict.fromkeys(("capability", "sms", "weight", "hidden", "intermediate", "experts", "top_k"), 1)
    for act in ("a16", "fp8 dynamic", "a16"):
        script._write(path, {**same, "act": act, "rows": [{"tokens": 4, "us": 1.0}]})
    assert [it["act"] for it in json.loads(path.read_text())["layers"]] == ["a16", "fp8 dynamic"]


def test_a_table_of_another_version_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launches.json"
    path.write_text('{"version": 2, "layers": [{"rows": []}]}')
    with pytest.raises(SystemExit) as stopped:
        script._write(path, {"rows": []})
    assert stopped.value.code == 2 and "has version 2" in capsys.readouterr().err
    assert path.read_text() == '{"version": 2, "layers": [{"rows": []}]}'


def test_a_slice_has_its_share_of_the_intermediate_size() -> None:
    whole = model_problem("deepseek-v3", "nvfp4")
    assert script._slice(whole, 1) == whole
    assert script._slice(whole, 8).dims.intermediate == whole.dims.intermediate // 8
    with pytest.raises(SystemExit) as stopped:
        script._slice(whole, 3)
    assert stopped.value.code == 2


def test_what_a_search_runs_is_compiled_before_it() -> None:
    options = argparse.Namespace(models=["deepseek-v3"], formats=["nvfp4"], experts=None, tp=8, tokens=[1])
    ((name, cell),) = script._cells(options)
    assert name == "deepseek-v3 tp8" and cell.problem.dims.intermediate == 256
    with standing_in(OfflineGpu.of(find_device("h200"))):
        bench = GpuBench(torch.device("cuda"), ("stream", "decode"), most=3)
        launches = script._launches(cell, bench)
        assert [launch.family for launch in launches] == ["stream", "decode", *["stream"] * 3]
        kept = {
            binary.key for launch in launches for binary in LaunchedCell(cell.problem, 1, launch).binaries()
        }
    assert len(kept) > 4
