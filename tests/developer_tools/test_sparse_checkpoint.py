"""Sparse checkpoints: real headers, no data; every built-in model is written and listed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from devtools import sparse_checkpoint
from devtools.sparse_checkpoint import write_sparse

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import model_names, read_entry
from moectl.checkpoint.source.shards import read_folder
from moectl.errors import UsageError
from support.sampling import every_nth

ROOT = Path(__file__).resolve().parents[2]
GPT = "openai/gpt-oss-20b"
Writer = Callable[..., Path]


def script(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, ROOT / "scripts/sparse_checkpoint", *arguments]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize("model", every_nth(model_names(), 8))
def test_two_layers_of_every_model(model: str, sparse_model: Writer) -> None:
    whole = open_checkpoint(sparse_model(model, layers=2), allow_catalogue=False)
    found, entry = whole.tensors, read_entry(model)
    assert whole.origin.kind == "folder"
    assert sorted(layer for group in whole.groups for layer in group.layers) == list(entry.layers[:2])
    assert {group.problem.experts for group in whole.groups} == {entry.experts}
    published = entry.listing()
    for name, info in found.items():
        assert (info.dtype, info.shape) == (published[name].dtype, published[name].shape)
    for layer in entry.layers[:2]:
        own = (f"layers.{layer}.", f"blocks.{layer}.")
        assert {name for name in published if any(part in name for part in own)} <= found.keys()


@pytest.mark.slow
@pytest.mark.parametrize("model", model_names())
def test_every_model_at_full_size(model: str, sparse_model: Writer) -> None:
    folder = sparse_model(model)
    whole, named = open_checkpoint(folder, allow_catalogue=False), open_checkpoint(model, offline=True)
    assert (whole.origin.kind, named.origin.kind) == ("folder", "catalogue")
    assert whole.groups == named.groups
    found, published = whole.tensors, named.tensors
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        name: (info.dtype, info.shape) for name, info in published.items()
    }
    taken = [path.stat().st_blocks * 512 for path in folder.glob("*.safetensors")]
    # Headers only: up to 1000 bytes for a tensor's entry, and a block that each file fills in part.
    assert sum(taken) < 1000 * len(found) + 8192 * len(taken)


def test_headers_are_real_and_data_are_holes(tmp_path: Path) -> None:
    written = write_sparse(read_entry(GPT), tmp_path / "out", shard_bytes=1 << 30)
    assert (written.tensors, written.files) == (24 * 8, 12)
    assert written.apparent > 10e9
    assert written.real < 1e6
    assert json.loads((tmp_path / "out/config.json").read_text()) == read_entry(GPT).config
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = read_folder(tmp_path / "out")
    assert found is not None
    assert index["weight_map"] == {name: info.file for name, info in found.items()}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in found.values())


def test_script_takes_a_name_and_a_folder(tmp_path: Path) -> None:
    told = script("gpt-oss-20b", tmp_path / "named").stdout
    assert "openai/gpt-oss-20b" in told
    assert "192 tensors" in told
    assert "bytes on disk" in told
    rows = [
        {"name": "model.layers.0.mlp.experts.{e}.up_proj.weight", "shape": [32, 64], "dtype": "BF16"},
        {"name": "model.layers.0.mlp.gate.weight", "shape": [8, 64], "dtype": "F32"},
    ]
    folder = tmp_path / "described"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 3}))
    (folder / "tensors.json").write_text(
        json.dumps({"layer_shown": "model.layers.0", "num_experts": 8, "tensors": rows})
    )
    document = json.loads(script(folder, tmp_path / "out", "--json").stdout)
    assert (document["model"], document["tensors"], document["files"]) == ("described", 27, 1)
    assert document["apparent"] == (tmp_path / "out/model.safetensors").stat().st_size


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/it").touch()
    assert "not an empty folder" in script(GPT, tmp_path / "full", code=2).stderr
    assert "Did you mean openai/gpt-oss-20b" in script("gpt-os-20b", tmp_path / "new", code=2).stderr
    assert "no config.json" in script(tmp_path, tmp_path / "new", code=4).stderr
    assert "Examples" in script("--help").stdout

    def filled(path: Path, size: int) -> None:
        path.write_bytes(bytes(size))

    monkeypatch.setattr(sparse_checkpoint.os, "truncate", filled)
    with pytest.raises(UsageError, match="without holes, where this checkpoint takes"):
        write_sparse(read_entry(GPT), tmp_path / "new")
    assert not (tmp_path / "new").exists()
