"""Which files belong to a checkpoint, and how a folder on disk can be wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source import shards
from moectl.checkpoint.source.shards import INDEX, index_files, shard_names
from moectl.errors import CheckpointError


@pytest.fixture
def folder(tiny_gpt_oss: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_gpt_oss, tmp_path / "copy"))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


BIAS = "model.layers.0.mlp.router.bias"


def test_copy_is_sound(folder: Path) -> None:
    found = open_checkpoint(folder)
    assert found.origin.kind == "folder"
    assert found.folder == folder
    assert {info.file for info in found.tensors.values()} == {
        path.name for path in folder.glob("*.safetensors")
    }


def test_truncated_file(folder: Path) -> None:
    with first_shard(folder).open("r+b") as file:
        file.truncate(first_shard(folder).stat().st_size - 1)
    refused(folder, first_shard(folder).name, "truncated", "tensor")


def test_appended_bytes(folder: Path) -> None:
    with first_shard(folder).open("ab") as file:
        file.write(b"more")
    refused(folder, first_shard(folder).name, "damaged")


def test_index_names_a_missing_file(folder: Path) -> None:
    first_shard(folder).unlink()
    refused(folder, INDEX, "does not exist")


def test_index_names_another_file(folder: Path) -> None:
    def move(weight_map: dict[str, Any]) -> None:
        weight_map[BIAS] = max(weight_map.values())

    edit_index(folder, move)
    refused(folder, BIAS, "missing")


def test_index_names_a_missing_tensor(folder: Path) -> None:
    def add(weight_map: dict[str, Any]) -> None:
        weight_map["model.extra"] = max(weight_map.values())

    edit_index(folder, add)
    refused(folder, "model.extra", "missing")


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd.safetensors",
        "../model.safetensors",
        "a/../../model.safetensors",
        "./model.safetensors",
        "a//model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "model\0.safetensors",
        "model.bin",
        "x" * 5000 + ".safetensors",
        "a/" * 2000 + "x.safetensors",
        "\u00e9" * 130 + ".safetensors",
        "a\nb.safetensors",
        "",
        None,
        3,
        ["model.safetensors"],
    ],
)
def test_index_leads_out(folder: Path, file: Any) -> None:
    def point(weight_map: dict[str, Any]) -> None:
        weight_map[BIAS] = file

    edit_index(folder, point)
    refused(folder, INDEX, BIAS)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(weight_map: Any) -> None:
    with pytest.raises(CheckpointError, match="weight_map"):
        index_files({"weight_map": weight_map})


def test_index_with_a_name_twice(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    refused(folder, "'a' occurs twice")


def test_same_tensor_in_two_files(folder: Path) -> None:
    (folder / INDEX).unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    raw = b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(len(raw).to_bytes(8, "little") + raw + b"x")
    refused(folder, "b.safetensors", "'t'", "a.safetensors")


def test_numbered_file_missing_without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert len(open_checkpoint(folder).tensors) > 0
    max(folder.glob("*.safetensors")).unlink()
    refused(folder, "2 files by its name, 1 are there")


@pytest.mark.parametrize(
    ("names", "sound"),
    [
        (["model-1-of-2", "model-2-of-2"], True),
        (["model-00000-of-00002", "model-00001-of-00002"], True),
        (["model-00001-of-00002", "model-00003-of-00002"], False),
        (["model-00002-of-00002", "model-00003-of-00002"], False),
        (["model-1-of-3", "model-2-of-3"], False),
    ],
)
def test_numbers_in_file_names(names: list[str], sound: bool) -> None:
    files = [f"{name}.safetensors" for name in names]
    if sound:
        assert shard_names(files, None) == files
        return
    with pytest.raises(CheckpointError, match="2 are there, with numbers from"):
        shard_names(files, None)


def test_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shard = first_shard(folder)
    outside = tmp_path / "outside.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)
    refused(folder, shard.name, "outside of its folder")


def test_link_through_a_folder(folder: Path, tmp_path: Path) -> None:
    shard = first_shard(folder)
    (tmp_path / "elsewhere").mkdir()
    shard.rename(tmp_path / "elsewhere" / shard.name)
    (folder / "sub").symlink_to(tmp_path / "elsewhere")

    def point(weight_map: dict[str, Any]) -> None:
        for name, file in weight_map.items():
            if file == shard.name:
                weight_map[name] = f"sub/{shard.name}"

    edit_index(folder, point)
    refused(folder, shard.name, "outside of its folder")


def test_link_loop_and_dangling_link(folder: Path) -> None:
    shard = first_shard(folder)
    shard.unlink()
    shard.symlink_to(shard)
    refused(folder, shard.name)
    shard.unlink()
    shard.symlink_to(folder / "nowhere")
    refused(folder, shard.name)


def test_config_link_out(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    refused(folder, "config.json", "outside of its folder")


def test_link_inside_is_fine(folder: Path) -> None:
    shard = first_shard(folder)
    shard.rename(folder / "data")
    shard.symlink_to("data")
    assert open_checkpoint(folder).tensors


def test_hub_cache_links_are_its_own(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for at, path in enumerate(sorted(folder.iterdir())):
        path.rename(repository / "blobs" / str(at))
        (snapshot / path.name).symlink_to(repository / "blobs" / str(at))
    assert open_checkpoint(snapshot).tensors
    secret = tmp_path / "secret.safetensors"
    first = min(snapshot.glob("*.safetensors"))
    first.resolve().rename(secret)
    first.unlink()
    first.symlink_to(secret)
    refused(snapshot, first.name, "outside of its folder")


def test_a_folder_instead_of_a_file(folder: Path) -> None:
    shard = first_shard(folder)
    shard.unlink()
    shard.mkdir()
    refused(folder, shard.name, "not a file")


def wait_free(folder: Path, name: str) -> None:
    """Puts a pipe that nobody writes to in place of a file."""
    (folder / name).unlink()
    os.mkfifo(folder / name)


@pytest.mark.parametrize("name", ["config.json", INDEX, "shard"])
def test_a_pipe_instead_of_a_file(folder: Path, name: str) -> None:
    name = first_shard(folder).name if name == "shard" else name
    wait_free(folder, name)
    refused(folder, name, "pipe")


def test_git_lfs_pointers(folder: Path) -> None:
    first_shard(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(folder, first_shard(folder).name, "Git LFS pointer", "git lfs pull")
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(folder, "config.json", "Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_long_documents(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "DOCUMENT_LIMIT", (folder / name).stat().st_size)
    open_checkpoint(folder if name == INDEX else folder / name)
    with (folder / name).open("a") as file:
        file.write(" ")
    refused(folder if name == INDEX else folder / name, name, "expected at most")


def test_sparse_document_is_not_read_whole(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 40)
    refused(folder, "config.json", str(1 << 40))


def test_too_many_files() -> None:
    names = [f"{at}.safetensors" for at in range(shards.SHARD_LIMIT + 1)]
    assert len(shard_names(names[1:], None)) == shards.SHARD_LIMIT
    for index in (None, {name: name for name in names}):
        with pytest.raises(CheckpointError, match="10001 weight files"):
            shard_names(names, index)


def test_many_numbered_files_are_counted_once() -> None:
    count = shards.SHARD_LIMIT
    names = [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    assert shard_names(names, None) == names


def test_files_of_a_folder_share_a_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "moectl.files.safetensors_header.TENSOR_LIMIT", len(open_checkpoint(folder).tensors) - 1
    )
    refused(folder, max(folder.glob("*.safetensors")).name, "tensors up to this file")
