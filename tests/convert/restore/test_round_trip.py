"""Conversion, verification and the way back."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_named
from moectl.convert.manifest.manifest import load_layer, load_manifest
from moectl.convert.restore import unconvert as unconvert_module
from moectl.convert.restore.unconvert import unconvert
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError, Unavailable, UsageError
from moectl.files.access import Access
from moectl.files.atomic import copy_file
from support import python_forks
from support.stream_checkpoints import CHECKPOINTS, all_tensors, folder_bytes, kimi_checkpoint, same_tensors

from ..conftest import plan_of

TARGETS = [
    ("gpt_oss", "marlin"),
    ("gpt_oss", "trtllm"),
    ("gpt_oss", "triton-hopper"),
    ("gpt_oss", "cutlass-sm90"),
    ("gpt_oss", "moectl"),
    ("kimi", "marlin"),
    ("kimi", "moectl"),
]


@pytest.mark.parametrize(("kind", "target"), TARGETS)
def test_the_way_back_gives_every_file_of_the_source(kind: str, target: str, tmp_path: Path) -> None:
    source, out, back = tmp_path / "source", tmp_path / "out", tmp_path / "back"
    CHECKPOINTS[kind](source)
    before = folder_bytes(source)
    convert(plan_of(source, target), out)
    assert folder_bytes(source) == before
    assert verify(out).findings == ()
    assert verify(out, source).ok
    assert not unconvert(out, back).experts_only
    assert folder_bytes(back) == before


def test_what_differs_in_a_source_beside_its_tensors(tmp_path: Path) -> None:
    source, out, back = CHECKPOINTS["gpt_oss"](tmp_path / "source"), tmp_path / "out", tmp_path / "back"
    (source / "tokenizer.json").write_text("{}")
    convert(plan_of(source), out)
    unconvert(out, back)
    assert verify(out, back).ok
    (back / "tokenizer.json").write_text("[]")
    weights = sorted(back.glob("*.safetensors"))[0]
    save_file(load_file(weights), weights, metadata={"format": "np"})
    assert verify(out, back).findings == (
        f"the metadata in the header of the source's {weights.name} is not what was converted",
        "the source's tokenizer.json is not the one that was converted",
    )
    (back / "tokenizer.json").unlink()
    assert len(verify(out, back).findings) == 1


def test_the_config_is_written_last_and_an_error_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = CHECKPOINTS["gpt_oss"](tmp_path / "source"), tmp_path / "back"
    convert(plan_of(source), tmp_path / "converted")
    before: set[str] = set()

    def full(source: int, name: str, target: Path, access: Access) -> None:
        if target.name == "config.json":
            before.update(file.name for file in out.iterdir())
            raise Unavailable("the disk is full")
        copy_file(source, name, target, access)

    monkeypatch.setattr(unconvert_module, "copy_file", full)
    with pytest.raises(Unavailable, match="full"):
        unconvert(tmp_path / "converted", out)
    assert before == {path.name for path in source.iterdir()} - {"config.json"} | {"progress.jsonl"}
    assert not out.exists()


KILLED = """
import os, sys
from pathlib import Path
from moectl.convert.restore import unconvert as module

copy_file, (name, *folders) = module.copy_file, sys.argv[1:]
module.copy_file = lambda *to: os._exit(9) if to[2].name == name else copy_file(*to)
module.unconvert(*map(Path, folders))
"""


def killed_at(name: str, converted: Path, out: Path) -> None:
    """Restores `converted` in a process that ends, as if killed, when `name` is to be written."""
    done = python_forks.run(["-c", KILLED, name, converted, out])
    assert done.returncode == 9


def test_what_a_killed_unconvert_has_left_is_named_and_replaced(tmp_path: Path) -> None:
    source, out = CHECKPOINTS["gpt_oss"](tmp_path / "source"), tmp_path / "back"
    convert(plan_of(source), tmp_path / "converted")
    killed_at("config.json", tmp_path / "converted", out)
    assert (out / "progress.jsonl").exists() and len(list(out.glob("*.safetensors"))) > 0
    with pytest.raises(CheckpointError, match="unfinished output of `moectl unconvert`") as found:
        open_checkpoint(out)
    assert "same `moectl unconvert` command" in found.value.hint
    weights = next(out.glob("*.safetensors"))
    weights.rename(weights.with_name(weights.name + ".partial"))
    unconvert(tmp_path / "converted", out)
    assert folder_bytes(out) == folder_bytes(source)


def test_a_killed_unconvert_of_another_directory_is_not_replaced(tmp_path: Path) -> None:
    source, out = CHECKPOINTS["gpt_oss"](tmp_path / "source"), tmp_path / "back"
    convert(plan_of(source), tmp_path / "converted")
    killed_at("config.json", tmp_path / "converted", out)
    (out / "notes.txt").write_text("mine")
    before = folder_bytes(out)
    with pytest.raises(UsageError, match=r"of another directory: it has notes\.txt") as found:
        unconvert(tmp_path / "converted", out)
    assert "Remove it" in found.value.hint and folder_bytes(out) == before
    (out / "progress.jsonl").unlink()
    with pytest.raises(UsageError, match="is not empty"):
        unconvert(tmp_path / "converted", out)


def test_shapes_may_be_stored_in_64_bits(tmp_path: Path) -> None:
    source = kimi_checkpoint(tmp_path / "source")
    for path in source.glob("*.safetensors"):
        tensors = {key: t.long() if key.endswith("_shape") else t for key, t in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    convert(plan_of(source), tmp_path / "out")
    assert verify(tmp_path / "out", source).ok
    unconvert(tmp_path / "out", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(source)


def test_a_router_bias_stored_among_the_experts_is_kept(tmp_path: Path) -> None:
    source = kimi_checkpoint(tmp_path / "source")
    bias = "mlp.gate.e_score_correction_bias"
    moved = "mlp.experts.e_score_correction_bias"
    for path in source.glob("*.safetensors"):
        save_file({key.replace(bias, moved): t for key, t in load_file(path).items()}, path, {"format": "pt"})
    for path in source.glob("*.index.json"):
        path.write_text(path.read_text().replace(bias, moved))
    names = {name for name in all_tensors(source) if name.endswith(moved)}
    assert names
    convert(plan_of(source), tmp_path / "out")
    assert verify(tmp_path / "out", source).ok
    assert names <= all_tensors(tmp_path / "out").keys()
    unconvert(tmp_path / "out", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(source)


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    source = CHECKPOINTS["gpt_oss"](Path(os.fsdecode(os.fsencode(tmp_path / "source") + b"\xff")))
    convert(plan_of(source), tmp_path / "out")
    assert load_manifest(tmp_path / "out").record.source.name.endswith("source\\udcff")
    assert verify(tmp_path / "out", source).ok


def test_mxint4_layout_and_its_way_back(tmp_path: Path) -> None:
    source = kimi_checkpoint(tmp_path / "source", hidden_size=256, moe_intermediate_size=256)
    convert(plan_of(source, "trtllm"), tmp_path / "out")
    assert verify(tmp_path / "out", source).ok
    unconvert(tmp_path / "out", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(source)


def test_stored_tensors_are_the_layout_of_the_source(converted: Path, gpt_oss: Path) -> None:
    stored = all_tensors(gpt_oss)
    manifest = load_manifest(converted)
    chains = layout_named(manifest.layout.name).chains(manifest.problem)
    for layer in manifest.layers:
        weights = load_layer(manifest, layer, check=True)
        prefix = f"model.layers.{layer}.mlp.experts."
        blocks = stored[f"{prefix}gate_up_proj_blocks"].flatten(2)
        assert torch.equal(weights["w13"], chains["w13"].apply(blocks))
        assert torch.equal(weights["w2_bias"], chains["w2_bias"].apply(stored[f"{prefix}down_proj_bias"]))
        file = load_file(converted / f"moectl-layer-{layer:05d}.experts")
        assert torch.equal(file[f"{prefix}w13_weight"], weights["w13"])
        assert torch.equal(file[f"{prefix}w2_weight_scale"], weights["w2_scale"])


def test_per_expert_projections_become_halves_of_w13(kimi: Path, tmp_path: Path) -> None:
    convert(plan_of(kimi), tmp_path / "out")
    manifest, stored = load_manifest(tmp_path / "out"), all_tensors(kimi)
    chain = layout_named(manifest.layout.name).chains(manifest.problem)["w13"]
    for layer in manifest.layers:
        got = load_layer(manifest, layer)["w13"]
        for expert in range(manifest.problem.experts):
            base = f"model.layers.{layer}.mlp.experts.{expert}"
            halves = [stored[f"{base}.{name}_proj.weight_packed"] for name in ("gate", "up")]
            codes = torch.cat(halves).view(torch.uint8)[None]
            assert torch.equal(got[expert], chain.apply(codes)[0])


def test_names_metadata_index_and_config(converted: Path, gpt_oss: Path) -> None:
    with safe_open(converted / "moectl-layer-00000.experts", "pt") as file:
        assert set(file.keys()) == {
            f"model.layers.0.mlp.experts.{name}"
            for name in (
                "w13_weight",
                "w13_weight_scale",
                "w13_bias",
                "w2_weight",
                "w2_weight_scale",
                "w2_bias",
            )
        }
        assert file.metadata() == {
            "format": "pt",
            "moectl.format_version": "2",
            "moectl.layout": "marlin-mxfp4 1",
        }
    index = json.loads((converted / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == {name for name in all_tensors(converted) if ".experts." not in name}
    config = json.loads((converted / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "moectl"
    assert (converted / "source.config.json").read_bytes() == (gpt_oss / "config.json").read_bytes()


def test_other_tensors_are_kept(converted: Path, gpt_oss: Path) -> None:
    kept = {key: t for key, t in all_tensors(gpt_oss).items() if ".experts." not in key}
    found = {key: t for key, t in all_tensors(converted).items() if ".experts." not in key}
    assert same_tensors(kept, found)
    whole = "model-00003-of-00003.safetensors"
    assert (converted / whole).samefile(gpt_oss / whole)


def test_experts_only_leaves_the_rest_out(source: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    convert(plan_of(source, experts_only=True), out)
    assert all(".experts." in key for key in all_tensors(out))
    assert verify(out, source).ok
    assert unconvert(out, back).experts_only
    experts = {key: t for key, t in all_tensors(source).items() if ".mlp.experts." in key}
    assert same_tensors(all_tensors(back), experts)
    index = json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == experts.keys()


def test_batches_and_threads_change_no_byte(source: Path, tmp_path: Path) -> None:
    large = plan_of(source, max_memory=1 << 30)
    small = plan_of(source, max_memory=25 << 20)
    convert(large, tmp_path / "large")
    convert(small, tmp_path / "small")
    convert(large, tmp_path / "single", threads=1)
    convert(small, tmp_path / "many", threads=16)
    wanted = folder_bytes(tmp_path / "large")
    assert large.layers[0].batch > 1
    assert folder_bytes(tmp_path / "small") == wanted
    assert folder_bytes(tmp_path / "single") == wanted
    assert folder_bytes(tmp_path / "many") == wanted


def test_one_expert_at_a_time_gives_the_same(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source)
    one = dataclasses.replace(
        plan, layers=tuple(dataclasses.replace(layer, batch=1) for layer in plan.layers)
    )
    convert(plan, tmp_path / "plain")
    convert(one, tmp_path / "one")
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "plain")


def test_progress_reaches_its_total(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []

    def note(done: int, total: int, text: str) -> None:
        calls.append((done, total, text))

    convert(plan_of(source), tmp_path / "out", progress=note)
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)
    assert calls[-1][0] == calls[-1][1] > 0
    calls.clear()
    verify(tmp_path / "out", progress=note)
    assert calls[-1][0] <= calls[-1][1]


def test_what_is_left_out_is_named(gpt_oss: Path, tmp_path: Path) -> None:
    (gpt_oss / "original").mkdir()
    (gpt_oss / "secret.txt").symlink_to("/etc/hostname")
    summary = convert(plan_of(gpt_oss), tmp_path / "out")
    assert set(summary.skipped_files) == {"original", "secret.txt"}
    assert not (tmp_path / "out" / "secret.txt").exists()


def test_links_to_blobs_belong_to_a_hub_cache_alone(gpt_oss: Path, tmp_path: Path) -> None:
    """The rule for small files is the one for weights."""
    for number, (name, skipped) in enumerate((("models--a--b", ()), ("home", ("tokenizer.json",)))):
        repository = tmp_path / name
        snapshot = repository / "snapshots" / "main"
        shutil.copytree(gpt_oss, snapshot)
        (repository / "blobs").mkdir()
        (snapshot / "tokenizer.json").rename(repository / "blobs" / "1")
        (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
        assert convert(plan_of(snapshot), tmp_path / f"out{number}").skipped_files == skipped


def test_a_hub_cache_snapshot(gpt_oss: Path, tmp_path: Path) -> None:
    """Its files are links into the cache's blobs, which belong to it."""
    repository = tmp_path / "models--someone--model"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(gpt_oss.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    before = folder_bytes(blobs)
    summary = convert(plan_of(snapshot), tmp_path / "out")
    assert summary.skipped_files == ()
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    unconvert(tmp_path / "out", tmp_path / "back")
    assert sorted(folder_bytes(tmp_path / "back").values()) == sorted(before.values())
    assert folder_bytes(blobs) == before
