"""Converted directories brought up to date with a newer checkpoint: what is written, crashes, refusals."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moectl
from moectl.convert.execute import update_folder as module
from moectl.convert.manifest.manifest_records import LOG, READY
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError
from support.invoking import moectl as command

PREFIX = "model.layers.1.mlp.experts."


@pytest.fixture
def newer(tiny_gpt_oss: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint with other experts in layer 1, and another router in layer 0."""
    folder = shutil.copytree(tiny_gpt_oss, tmp_path / "newer")
    change(
        folder, f"{PREFIX}down_proj_blocks", f"{PREFIX}gate_up_proj_bias", "model.layers.0.mlp.router.bias"
    )
    return folder


def change(folder: Path, *names: str) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if set(names) & set(tensors):
            for name in set(names) & set(tensors):
                tensors[name] = tensors[name].flip(0).contiguous()
            file.unlink()
            save_file(tensors, file, {"format": "pt"})


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("ranks", [{}, {"tp_size": 2, "ep_size": 2}], ids=["whole", "ranks"])
def test_only_what_changed_is_written(
    ranks: dict[str, int], tiny_gpt_oss: Path, newer: Path, tmp_path: Path
) -> None:
    out, cold = tmp_path / "out", tmp_path / "cold"
    moectl.convert(tiny_gpt_oss, out, "marlin", **ranks)  # type: ignore[arg-type]
    moectl.convert(newer, cold, "marlin", **ranks)  # type: ignore[arg-type]
    before = {path: path.stat().st_ino for path in out.rglob("moectl-layer-*")}
    planned = command("refit", out, newer, "--dry-run", "--json").document
    assert planned["changed"] and planned["dry_run"]
    assert [row["layers"] for row in planned["folders"]] == [[1]] * (4 if ranks else 1)
    assert all(row["unchanged_layers"] == [0] and row["files"] for row in planned["folders"])
    assert {path: path.stat().st_ino for path in before} == before
    done = command("refit", out, newer, "--json").document
    assert {**done, "dry_run": True} == planned
    assert contents(out) == contents(cold)
    same = {path.name for path in before if path.stat().st_ino == before[path]}
    assert same == {"moectl-layer-00000.safetensors"}
    assert verify(out, newer).ok
    again = command("refit", out, newer)
    assert again.stdout.count(": up to date") == len(planned["folders"])


def test_the_text_says_what_was_written(tiny_gpt_oss: Path, newer: Path, tmp_path: Path) -> None:
    moectl.convert(tiny_gpt_oss, tmp_path / "out", "marlin")
    says = command("refit", tmp_path / "out", newer, "--dry-run").stdout
    assert "out: would write layers 1 (" in says and "other file; 1 layer unchanged" in says
    assert "out: wrote layers 1 (" in command("refit", tmp_path / "out", newer).stdout


@pytest.mark.parametrize("at", ["log", "layer", "manifest"])
def test_an_interrupted_update_is_no_directory_until_it_is_completed(
    at: str, tiny_gpt_oss: Path, newer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cold = tmp_path / "out", tmp_path / "cold"
    moectl.convert(tiny_gpt_oss, out, "marlin")
    moectl.convert(newer, cold, "marlin")

    def crash(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    place = {
        "log": (module, "sync_folder"),
        "layer": (moectl.convert.execute.convert, "_convert_layers"),  # type: ignore[attr-defined]
        "manifest": (moectl.convert.execute.convert, "finish_folder"),  # type: ignore[attr-defined]
    }[at]
    with monkeypatch.context() as patch:
        patch.setattr(*place, crash)
        with pytest.raises(KeyboardInterrupt):
            command_update(out, newer)
    assert (out / LOG).exists() and not (out / READY).exists()
    with pytest.raises(CheckpointError, match="READY is missing"):
        moectl.load_prepared(out)
    command_update(out, newer)
    assert contents(out) == contents(cold)


def command_update(out: Path, newer: Path) -> None:
    for update in module.plan_updates(out, moectl.open_checkpoint(newer)):
        assert update.needed
        module.update_folder(update)


def test_a_checkpoint_that_changed_again_after_an_interrupt(
    tiny_gpt_oss: Path, newer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cold = tmp_path / "out", tmp_path / "cold"
    moectl.convert(tiny_gpt_oss, out, "marlin")
    with monkeypatch.context() as patch:
        patch.setattr(moectl.convert.execute.convert, "finish_folder", lambda *a: 1 / 0)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            command_update(out, newer)
    change(newer, f"{PREFIX}down_proj_bias", "model.layers.0.mlp.experts.down_proj_bias")
    command_update(out, newer)
    moectl.convert(newer, cold, "marlin")
    assert contents(out) == contents(cold)


def test_files_that_the_checkpoint_lost_are_removed(tiny_gpt_oss: Path, newer: Path, tmp_path: Path) -> None:
    older = shutil.copytree(tiny_gpt_oss, tmp_path / "older")
    (older / "notes.json").write_text("{}")
    moectl.convert(older, tmp_path / "out", "marlin")
    assert (tmp_path / "out" / "notes.json").exists()
    command_update(tmp_path / "out", newer)
    assert not (tmp_path / "out" / "notes.json").exists() and verify(tmp_path / "out").ok


def test_other_checkpoints_are_refused(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    from moectl.synth import synthesize

    moectl.convert(tiny_gpt_oss, tmp_path / "out", "marlin")
    other = synthesize(
        "openai/gpt-oss-20b", tmp_path / "other", layers=2, experts=8, hidden=128, intermediate=192
    )
    says = command("refit", tmp_path / "out", other, code=2).stderr
    assert "is no newer version of what" in says and "layer groups" in says
    assert "given twice" in command("refit", tiny_gpt_oss, tiny_gpt_oss, code=2).stderr
    assert "is not a finished converted directory" in command("refit", other, tiny_gpt_oss, code=4).stderr
    assert "there is no directory" in command("refit", tmp_path / "none", tiny_gpt_oss, code=4).stderr
    assert torch.is_tensor(moectl.load_prepared(tmp_path / "out").weights["w13"])
