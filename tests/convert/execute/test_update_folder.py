"""Converted directories brought up to date with a newer checkpoint: what is written, crashes, refusals."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import moectl
from moectl.convert.execute import convert as convert_module
from moectl.convert.execute import shared_files
from moectl.convert.execute import update_folder as module
from moectl.convert.manifest.manifest_records import LOG, READY
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError
from support.converted_folders import format_1
from support.invoking import moectl as command
from support.sampling import every_nth
from support.stream_checkpoints import nvfp4_checkpoint

PREFIX = "model.layers.1.mlp.experts."


def changed(source: Path, folder: Path) -> Path:
    """A copy of the tiny checkpoint with other experts in layer 1, and another router in layer 0."""
    shutil.copytree(source, folder)
    change(
        folder, f"{PREFIX}down_proj_blocks", f"{PREFIX}gate_up_proj_bias", "model.layers.0.mlp.router.bias"
    )
    return folder


@pytest.fixture
def newer(tiny_gpt_oss: Path, tmp_path: Path) -> Path:
    return changed(tiny_gpt_oss, tmp_path / "newer")


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


DEPLOYMENTS = {
    "whole": (1, 1),
    "tp2": (2, 1),
    "ep2": (1, 2),
    "tp2-ep2": (2, 2),
}


def converted(source: Path, out: Path, sizes: tuple[int, int] = (1, 1), layout: str = "marlin") -> Path:
    moectl.convert(source, out, layout, tp_size=sizes[0], ep_size=sizes[1])
    return out


@pytest.mark.parametrize("sizes", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_only_what_changed_is_written(
    sizes: tuple[int, int], tiny_gpt_oss: Path, newer: Path, tmp_path: Path
) -> None:
    out, cold = tmp_path / "out", tmp_path / "cold"
    converted(tiny_gpt_oss, out, sizes)
    converted(newer, cold, sizes)
    ranks = sizes[0] * sizes[1]
    before = {path: path.stat().st_ino for path in out.rglob("moectl-layer-*")}
    whole = contents(out)
    planned = command("refit", out, newer, "--dry-run", "--json").document
    assert planned["changed"] and planned["dry_run"] and contents(out) == whole
    *parts, top = planned["folders"]
    assert len(parts) == (ranks if ranks > 1 else 0) and top["folder"] == str(out) and top["files"]
    for row in parts if ranks > 1 else [top]:
        assert row["layers"] == [1] and row["unchanged_layers"] == [0] and row["bytes_out"] > 0
    assert not any(row["files"] for row in parts)
    done = command("refit", out, newer, "--json").document
    assert {**done, "dry_run": True} == planned
    assert contents(out) == contents(cold)
    same = {path.name for path in before if path.stat().st_ino == before[path]}
    assert same == {"moectl-layer-00000.experts"}
    assert verify(out, newer).ok
    assert command("refit", out, newer).stdout == f"{out}: up to date\n"


def test_ranks_whose_layers_stay_are_not_read_again(
    tiny_gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = shutil.copytree(tiny_gpt_oss, tmp_path / "newer")
    change(newer, "model.layers.0.mlp.router.bias")
    out, cold = converted(tiny_gpt_oss, tmp_path / "out", (2, 1)), tmp_path / "cold"
    command_update(out, newer)
    assert contents(out) != contents(converted(tiny_gpt_oss, tmp_path / "old", (2, 1)))
    assert contents(out) == contents(converted(newer, cold, (2, 1)))
    change(newer, "model.layers.1.mlp.router.bias")
    with monkeypatch.context() as patch:  # names of the checkpoint's folder and headers are the same now
        patch.setattr(module, "convert", lambda *a, **k: pytest.fail("a rank was converted"))
        command_update(out, newer)
    shutil.rmtree(cold)
    assert contents(out) == contents(converted(newer, cold, (2, 1)))


def test_the_text_says_what_was_written(tiny_gpt_oss: Path, newer: Path, tmp_path: Path) -> None:
    moectl.convert(tiny_gpt_oss, tmp_path / "out", "marlin")
    says = command("refit", tmp_path / "out", newer, "--dry-run").stdout
    assert "out: would rewrite layer 1 (" in says and "other file; 1 layer unchanged" in says
    assert "out: rewrote layer 1 (" in command("refit", tmp_path / "out", newer).stdout


PLACES = {
    "log": (module, "sync_folder"),
    "layer": (convert_module, "_convert_layers"),
    "manifest": (convert_module, "finish_folder"),
    "shared": (shared_files, "write_passthrough"),
    "ready": (shared_files, "write_signed"),
}


class Conversions(NamedTuple):
    """A directory, the checkpoint that it is brought up to date with, and what it holds then."""

    sizes: tuple[int, int]
    out: Path
    newer: Path
    updated: dict[str, str]


@pytest.fixture(scope="module", params=[(1, 1), (2, 1), (1, 2)], ids=["whole", "tp2", "ep2"])
def conversions(
    request: pytest.FixtureRequest, tiny_gpt_oss: Path, tmp_path_factory: pytest.TempPathFactory
) -> Conversions:
    """Made once for all interrupts; a test that writes into `out` takes a copy."""
    folder, sizes = tmp_path_factory.mktemp("conversions"), request.param
    newer = changed(tiny_gpt_oss, folder / "newer")
    out = converted(tiny_gpt_oss, folder / "out", sizes)
    return Conversions(sizes, out, newer, contents(converted(newer, folder / "cold", sizes)))


@pytest.mark.parametrize(("at", "after"), every_nth(product(PLACES, [0, 1, 2]), 6))
def test_an_interrupted_update_is_no_directory_until_it_is_completed(
    conversions: Conversions,
    at: str,
    after: int,
    tiny_gpt_oss: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, newer = conversions.sizes, conversions.newer
    out = shutil.copytree(conversions.out, tmp_path / "out")
    place, name = PLACES[at]
    original, calls = getattr(place, name), [0]

    def crash(*arguments: object, **keywords: object) -> object:
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, crash)
        try:
            command_update(out, newer)
        except KeyboardInterrupt:
            assert (out / LOG).exists()
        else:
            assert calls[0] <= after  # it is not called so often
    # Before the first file is changed, the old directory is there as it was.
    untouched = at == "log" and after == 0
    assert (out / READY).exists() == (untouched or calls[0] <= after)
    if not (out / READY).exists():
        rank = None if sizes == (1, 1) else 0
        with pytest.raises(CheckpointError, match="READY is missing"):
            moectl.load_prepared(out, rank=rank)
        with pytest.raises(CheckpointError, match="READY is missing"):
            verify(out)
        if sizes != (1, 1):
            with pytest.raises(CheckpointError):
                moectl.load_prepared(out / "rank-00")
        command_update(out, newer)
    elif untouched:
        assert verify(out, tiny_gpt_oss).ok
        command_update(out, newer)
    assert contents(out) == conversions.updated


def command_update(out: Path, newer: Path) -> None:
    update = module.plan_update(out, moectl.open_checkpoint(newer))
    assert update.needed
    module.update_folder(update)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tp2", "ep2"])
def test_ranks_of_a_checkpoint_that_changed_again_after_an_interrupt(
    sizes: tuple[int, int], tiny_gpt_oss: Path, newer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = converted(tiny_gpt_oss, tmp_path / "out", sizes)
    with monkeypatch.context() as patch:
        patch.setattr(module, "finish_ranks", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command_update(out, newer)
    change(newer, f"{PREFIX}down_proj_bias", "model.layers.0.mlp.experts.down_proj_bias")
    command_update(out, newer)
    assert contents(out) == contents(converted(newer, tmp_path / "cold", sizes))


@pytest.mark.parametrize("expert", [0, 7], ids=["rank-00", "rank-01"])
@pytest.mark.parametrize("done", every_nth([1, 0, 2], 3), ids=lambda done: f"{done} ranks done")
def test_ranks_that_depend_on_each_others_experts(
    expert: int, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = nvfp4_checkpoint(tmp_path / "source")
    newer = shutil.copytree(source, tmp_path / "newer")
    (file,) = newer.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if f".experts.{expert}." in name and name.endswith(".input_scale"):
            tensors[name] = tensors[name] * 4096  # now the largest of the layer
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
    out = converted(source, tmp_path / "out", (1, 2), "trtllm")
    assert not module.plan_update(out, moectl.open_checkpoint(source)).needed
    original, calls = module._begin, [0]

    def crash(*arguments: Any, **keywords: Any) -> None:
        calls[0] += 1
        if calls[0] > done + 1:  # the first is of the directory above the ranks
            raise KeyboardInterrupt
        original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_begin", crash)
        patch.setattr(module, "finish_ranks", crash)
        with pytest.raises(KeyboardInterrupt):
            command_update(out, newer)
    command_update(out, newer)
    assert contents(out) == contents(converted(newer, tmp_path / "cold", (1, 2), "trtllm"))
    assert verify(out, newer).ok and not module.plan_update(out, moectl.open_checkpoint(newer)).needed


def test_directories_that_are_not_updated(tiny_gpt_oss: Path, newer: Path, tmp_path: Path) -> None:
    out = converted(tiny_gpt_oss, tmp_path / "out", (2, 1))
    says = command("refit", out / "rank-01", newer, code=2).stderr
    assert "is the directory of one of several ranks, which are updated together" in says
    shutil.rmtree(out / "rank-01")
    assert "lacks rank-01 of 2 ranks" in command("refit", out, newer, code=4).stderr
    (out / READY).unlink()
    assert "READY is missing" in command("refit", out, newer, code=4).stderr


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


@pytest.mark.parametrize("kind", ["whole", "tp", "ep", "experts-only", "tp/rank-01"])
def test_directories_of_format_version_1_are_refused(kind: str, tmp_path: Path) -> None:
    old = format_1(tmp_path)
    before = contents(old)
    says = command("refit", old / kind, old / "source", code=2).stderr
    if "rank-" in kind:
        assert "is the directory of one of several ranks" in says
    else:
        assert "is of format version 1; only version 2 is updated" in says
        assert "Convert the checkpoint into an empty directory." in says
    assert contents(old) == before


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=["whole", "tp2"])
def test_files_that_the_checkpoint_lost_are_removed(
    sizes: tuple[int, int], tiny_gpt_oss: Path, newer: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(tiny_gpt_oss, tmp_path / "older")
    (older / "notes.json").write_text("{}")
    converted(older, tmp_path / "out", sizes)
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
    assert "is not the same model as" in says and "layer groups" in says
    kimi = synthesize("kimi-k2", tmp_path / "kimi", layers=2, experts=8, hidden=256, intermediate=256)
    says = command("refit", tmp_path / "out", kimi, code=2).stderr
    assert "is not the same model as" in says and "--to" not in says
    assert "given twice" in command("refit", tiny_gpt_oss, tiny_gpt_oss, code=2).stderr
    assert "is not a finished converted directory" in command("refit", other, tiny_gpt_oss, code=4).stderr
    assert "there is no directory" in command("refit", tmp_path / "none", tiny_gpt_oss, code=4).stderr
    assert torch.is_tensor(moectl.load_prepared(tmp_path / "out").weights["w13"])


def test_the_log_of_an_update_is_as_private_as_the_directory(
    tiny_gpt_oss: Path, newer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, private = os.umask(0o022), shutil.copytree(tiny_gpt_oss, tmp_path / "private")
    try:
        for folder in (private, newer):
            for file in folder.iterdir():
                file.chmod(0o600)
        out = converted(private, tmp_path / "out", (1, 1))
        monkeypatch.setattr(module, "convert", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command_update(out, newer)
    finally:
        os.umask(before)
    assert stat.S_IMODE((out / LOG).stat().st_mode) == 0o600
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir() if file.is_file()} == {0o600}
