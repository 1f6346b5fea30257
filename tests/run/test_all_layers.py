"""Whole checkpoints: layers picked, run one after the other, and those that cannot be run."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import pytest
from torch import Tensor

from moectl.checkpoint import open_checkpoint
from moectl.cli.checkpoint_argument import pick_layers
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.errors import BackendFailed, CheckpointError, UsageError
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.layer.layer_source import CheckpointLayers, ConvertedLayers
from moectl.run import RunPlan
from moectl.run.all_layers import every_layer
from support.fake_backends import CPU, offer, right


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("all", [1, 2, 3, 7]), ("2", [2]), ("7,1", [1, 7]), ("1-3, 2,7", [1, 2, 3, 7]), ("ALL", [1, 2, 3, 7])],
)
def test_layers_are_picked(text: str, numbers: list[int]) -> None:
    assert pick_layers(text, [1, 2, 3, 7]) == numbers


@pytest.mark.parametrize(
    "text", ["", "x", "1,", "3-1", "-1", "1-", "0", "1-7", "1-99999999999", "1.5", "1--2"]
)
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="1-3, 7"):
        pick_layers(text, [1, 2, 3, 7])


def test_layers_run_one_after_the_other_and_none_stays(
    tiny_kimi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most: list[int] = []

    def watching(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gc.collect()
        if not any(it() is prepared.weights["w13"] for it in alive):
            alive.append(weakref.ref(prepared.weights["w13"]))
        most.append(sum(it() is not None for it in alive))
        return right(prepared, x, ids, weights)

    offer(monkeypatch, "watching", watching)
    source = CheckpointLayers(open_checkpoint(tiny_kimi))
    numbers = source.layers()
    said: list[str] = []
    runs = list(every_layer(source, numbers, CPU, RunPlan(repeats=1), said.append))
    assert [run.number for run in runs] == numbers == [1, 2]
    assert all(run.ok for run in runs) and said == ["watching", "watching"]
    assert len(alive) == 2 and max(most) == 1


def test_a_layer_that_cannot_be_run_is_an_error_and_the_others_run(
    tiny_gpt_oss: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny_gpt_oss, folder)
    checkpoint = open_checkpoint(folder)
    source = CheckpointLayers(checkpoint)
    number = source.layers()[1]
    last = {info.file for name, info in checkpoint.tensors.items() if f".{number}." in name}
    first = {info.file for name, info in checkpoint.tensors.items() if ".0." in name}
    for file in last - first:
        (folder / file).unlink()
    runs = list(every_layer(source, source.layers(), CPU, RunPlan(backends=("torch",), repeats=1)))
    assert [run.ok for run in runs] == [True, False]
    assert runs[1].error is not None and runs[1].compared is None


def test_a_fallback_is_chosen_only_where_it_is_allowed(
    tiny_gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise ValueError("out of luck")

    offer(monkeypatch, "breaks", breaks)
    source = CheckpointLayers(open_checkpoint(tiny_gpt_oss))
    (run,) = every_layer(source, [0], CPU, RunPlan(repeats=1))
    assert isinstance(run.error, BackendFailed) and "out of luck" in str(run.error)
    for plan in (RunPlan(fallback=True, repeats=1), RunPlan(("breaks",), fallback=True, repeats=1)):
        (run,) = every_layer(source, [0], CPU, plan)
        assert run.ok and run.compared is not None
        assert [it.backend for it in run.compared.tried] == ["breaks"]
        assert run.compared.outcomes[0].backend != "breaks"
    # One that is refused before it runs is among those that were tried.
    (run,) = every_layer(source, [0], CPU, RunPlan(("moectl",), fallback=True, repeats=1))
    assert run.ok and run.compared is not None
    assert [it.backend for it in run.compared.tried] == ["moectl", "breaks"]


def test_a_converted_folder_is_opened_once(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gpt_oss)
    layout = layout_for("marlin", checkpoint.groups[0].problem.scheme.weight)
    convert(plan_conversion(checkpoint, layout), tmp_path / "out", threads=1)
    source = ConvertedLayers(tmp_path / "out")
    assert source.layers() == [0, 1]
    runs = list(every_layer(source, [1, 0], CPU, RunPlan(backends=("torch",), dtype="fp16", repeats=1)))
    assert [run.number for run in runs] == [1, 0] and all(run.ok for run in runs)
    assert all(run.model_dtype == "bf16" for run in runs)
    with pytest.raises(CheckpointError):
        ConvertedLayers(tmp_path).layers()
