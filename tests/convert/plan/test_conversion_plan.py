"""Plans from headers alone, and everything a plan refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moectl.checkpoint import Checkpoint, TensorInfo, layer_groups, open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.errors import CheckpointError, ExitCode, MoectlError, NoBackend, Unavailable, UsageError
from moectl.problem.moe_problem import MoEProblem
from support.stream_checkpoints import folder_bytes, gpt_oss_checkpoint, kimi_checkpoint

from ..conftest import plan_of

EXPERTS = "model.layers.1.mlp.experts."


def changed(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> Checkpoint:
    """The checkpoint as it is read when its files have these headers."""
    groups = layer_groups(checkpoint.config, tensors)
    return dataclasses.replace(checkpoint, tensors=tensors, groups=groups)


def plan(checkpoint: Checkpoint, target: str = "marlin", **options: Any) -> object:
    layout = layout_for(target, checkpoint.groups[0].problem.scheme.weight, None)
    return plan_conversion(checkpoint, layout, **options)


def test_sizes_agree_with_what_is_written(source: Path, tmp_path: Path) -> None:
    planned = plan_of(source)
    summary = convert(planned, tmp_path / "out")
    files = folder_bytes(tmp_path / "out")
    layers = {name: data for name, data in files.items() if name.startswith("moectl-layer-")}
    assert planned.bytes_out == summary.bytes_out == sum(map(len, layers.values()))
    experts = [t for t in open_checkpoint(source).tensors.values() if ".mlp.experts." in t.name]
    assert planned.tensors_in == len(experts)
    assert planned.bytes_in == sum(t.nbytes for t in experts)
    assert sum(map(len, files.values())) <= planned.disk_needed


def test_planning_creates_nothing_and_reads_no_weights(gpt_oss: Path) -> None:
    before = folder_bytes(gpt_oss)
    checkpoint = dataclasses.replace(open_checkpoint(gpt_oss), folder=None)
    for path in gpt_oss.glob("*.safetensors"):
        path.unlink()
    planned = plan(checkpoint)
    assert planned.bytes_in > 0
    assert folder_bytes(gpt_oss).items() <= before.items()


def test_headers_without_weights_cannot_be_converted(gpt_oss: Path, tmp_path: Path) -> None:
    checkpoint = dataclasses.replace(open_checkpoint(gpt_oss), folder=None)
    layout = layout_for("marlin", checkpoint.groups[0].problem.scheme.weight, None)
    with pytest.raises(Unavailable, match="are not on this machine"):
        convert(plan_conversion(checkpoint, layout), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [gpt_oss_checkpoint, kimi_checkpoint])
def test_a_missing_tensor_is_named(make: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path / "source"))
    names = [name for name in checkpoint.tensors if name.startswith("model.layers.2.mlp.experts.")]
    for name in names:
        rest = {key: info for key, info in checkpoint.tensors.items() if key != name}
        with pytest.raises(CheckpointError, match=rf"layer 2: .*{re.escape(name.rpartition('.')[2])}"):
            plan(changed(checkpoint, rest))


def test_an_extra_tensor_is_named(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    name = f"{EXPERTS}gate_up_proj_zeros"
    extra = TensorInfo(name, "U8", (1,), "model-00001-of-00003.safetensors", 0, 1)
    with pytest.raises(CheckpointError, match=r"layer 1(: .*gate_up_proj_zeros| mixes experts)"):
        plan(changed(checkpoint, {**checkpoint.tensors, name: extra}))


@pytest.mark.parametrize("change", [{"dtype": "I8"}, {"dtype": "F64"}, {"shape": (5, 5)}])
def test_a_wrong_dtype_or_shape_is_named(source: Path, change: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(source)
    names = [name for name in checkpoint.tensors if name.startswith(EXPERTS)]
    for name in names:
        wrong = dataclasses.replace(checkpoint.tensors[name], **change)
        named = name if "dtype" in change else EXPERTS + ".*"  # a wrong size may be another tensor's
        # Matrices of one expert in two formats are refused together.
        mixed = rf"one format, got .*{'.'.join(name.split('.')[-2:])} {change.get('dtype')}"
        with pytest.raises(CheckpointError, match=f"'{named}' must (be|have) |{mixed}"):
            plan(changed(checkpoint, {**checkpoint.tensors, name: wrong}))


def test_a_layer_stored_otherwise_than_its_group_is_refused(kimi: Path) -> None:
    checkpoint = open_checkpoint(kimi)
    tensors = {
        key: dataclasses.replace(info, dtype="I64", end=info.end + 8)
        if "layers.2." in key and key.endswith("weight_shape")
        else info
        for key, info in checkpoint.tensors.items()
    }
    with pytest.raises(CheckpointError, match="layers 1 and 2 store their experts differently"):
        plan(changed(checkpoint, tensors))


def test_memory_bound(source: Path) -> None:
    with pytest.raises(UsageError, match=r"one expert of layer . needs .* --max-memory allows") as refused:
        plan_of(source, max_memory=1 << 20)
    assert "--max-memory" in refused.value.hint
    with pytest.raises(UsageError, match=r"--max-memory allows 1000 bytes\."):
        plan_of(source, max_memory=1000)
    small, large = plan_of(source, max_memory=26 << 20), plan_of(source, max_memory=1 << 30)
    assert small.peak_memory <= 26 << 20
    assert large.peak_memory <= 1 << 30


def with_problem(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    group = checkpoint.groups[0]
    problem: MoEProblem = dataclasses.replace(group.problem, **changes)
    return dataclasses.replace(checkpoint, groups=(dataclasses.replace(group, problem=problem),))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"act_order": "group"}, UsageError, "act order"),
    ],
)
def test_problems_without_a_converter(
    kimi: Path, changes: dict[str, Any], error: type[MoectlError], text: str
) -> None:
    with pytest.raises(error, match=text):
        plan(with_problem(open_checkpoint(kimi), **changes))


def test_a_size_that_the_layout_cannot_hold(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(kimi_checkpoint(tmp_path / "source", hidden_size=96))
    with pytest.raises(NoBackend, match="hidden size must be a multiple of 128, got 96"):
        plan(checkpoint)


def test_nothing_to_convert(kimi: Path) -> None:
    checkpoint = open_checkpoint(kimi)
    with pytest.raises(CheckpointError, match="no MoE layers"):
        plan_conversion(
            dataclasses.replace(checkpoint, groups=()),
            layout_for("marlin", checkpoint.groups[0].problem.scheme.weight, None),
        )
    with pytest.raises(Unavailable, match="no tensor headers"):
        plan(dataclasses.replace(checkpoint, tensors={}))


def test_a_source_file_may_not_have_a_name_of_ours(gpt_oss: Path) -> None:
    checkpoint = open_checkpoint(gpt_oss)
    for bad in ("moectl-layer-00000.safetensors", "sub/model.safetensors", "../model.safetensors"):
        tensors = {
            key: dataclasses.replace(info, file=bad) if "norm" in key else info
            for key, info in checkpoint.tensors.items()
        }
        with pytest.raises(CheckpointError, match="must have a plain name"):
            plan(changed(checkpoint, tensors))


def rewrite(file: Path, change: Any) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file({key: t.clone() for key, t in tensors.items()}, file, {"format": "pt"})


def test_damaged_folders_give_one_sentence_and_exit_4(gpt_oss: Path) -> None:
    first = gpt_oss / "model-00001-of-00003.safetensors"
    whole = first.read_bytes()

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.experts.down_proj_bias"]

    def retype(tensors: dict[str, torch.Tensor]) -> None:
        key = "model.layers.0.mlp.experts.down_proj_scales"
        tensors[key] = tensors[key].to(torch.int16)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.down_proj_zeros"] = torch.zeros(3)

    def refused(text: str) -> None:
        with pytest.raises(MoectlError) as caught:
            plan_of(gpt_oss)
        assert caught.value.exit_code == ExitCode.BAD_CHECKPOINT, str(caught.value)
        assert text in str(caught.value)

    first.write_bytes(whole[:-1])
    refused("truncated")
    first.unlink()
    refused(first.name)
    for change, text in ((drop, "down_proj_bias"), (retype, "down_proj_scales"), (add, "down_proj_zeros")):
        first.write_bytes(whole)
        rewrite(first, change)
        if change is add:
            index = json.loads((gpt_oss / "model.safetensors.index.json").read_text())
            index["weight_map"]["model.layers.0.mlp.experts.down_proj_zeros"] = first.name
            (gpt_oss / "model.safetensors.index.json").write_text(json.dumps(index))
        refused(text)


def test_unknown_quantization_method(gpt_oss: Path) -> None:
    config = json.loads((gpt_oss / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "sorcery"
    (gpt_oss / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="sorcery"):
        plan_of(gpt_oss)
