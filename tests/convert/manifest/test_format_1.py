"""Directories of format version 1, as an earlier moectl wrote them, are read, checked and restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import moectl
from moectl.checkpoint import open_checkpoint
from moectl.convert.manifest.manifest import load_manifest
from moectl.convert.rank_slice import RankShard, shard_of
from moectl.convert.restore.unconvert import unconvert
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError, UsageError
from moectl.integrations.model_experts import open_experts
from moectl.layer.prepare import checkpoint_layer, converted_layer, load_prepared
from support.converted_folders import edit_manifest, format_1
from support.invoking import moectl as command
from support.stream_checkpoints import all_tensors, folder_bytes, same_tensors

KINDS = {"whole": (1, 1), "tp": (2, 1), "ep": (1, 2), "experts-only": (1, 1)}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return format_1(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_and_the_way_back(old: Path, kind: str) -> None:
    report = verify(old / kind, old / "source")
    assert report.ok and report.compared and report.layers == 2 * KINDS[kind][0] * KINDS[kind][1]
    assert unconvert(old / kind, old / "back").experts_only == (kind == "experts-only")
    if kind == "experts-only":
        experts = {name: t for name, t in all_tensors(old / "source").items() if ".mlp.experts." in name}
        assert same_tensors(all_tensors(old / "back"), experts)
    else:
        assert folder_bytes(old / "back") == folder_bytes(old / "source")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_those_of_a_new_conversion(old: Path, kind: str) -> None:
    tp, ep = KINDS[kind]
    moectl.convert(old / "source", old / "new", "moectl", tp_size=tp, ep_size=ep)
    for rank in range(tp * ep):
        number = rank if tp * ep > 1 else None
        folder = old / kind if number is None else old / kind / f"rank-0{rank}"
        assert (converted_layer(load_manifest(folder)).router is None) == (kind == "experts-only")
        for layer in (0, 1):
            was, now = (
                load_prepared(old / name, layer, "torch", rank=number, check=True) for name in (kind, "new")
            )
            assert was.weights.keys() == now.weights.keys() and was.problem == now.problem
            for role, tensor in was.weights.items():
                assert torch.equal(tensor.view(torch.uint8), now.weights[role].view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_engines_are_served(old: Path, kind: str) -> None:
    """Ranks from the directory of any one of them, which finds the others beside it."""
    tp, ep = KINDS[kind]
    whole = checkpoint_layer(open_checkpoint(old / "source"), 1).prepared("torch", "cpu")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=g).to(torch.bfloat16)
    ids, weights = torch.tensor([[0, 1]] * 3, dtype=torch.int32), torch.rand(3, 2, generator=g)
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(tp * ep):
        experts = open_experts(old / kind / "rank-01" if tp * ep > 1 else old / kind)
        assert experts.converted and experts.published == {"quant_method": "mxfp4"}
        prepared = experts.prepared(1, torch.device("cpu"), "bf16", "torch", shard_of(rank, tp, ep))
        total += prepared(x, ids, weights).float()
    want = whole(x, ids, weights).float()
    assert (total - want).norm() < 0.01 * want.norm()
    with pytest.raises(UsageError, match="this is rank 0 of 4"):
        experts.problem_of(1, RankShard(tp_size=4))


def test_commands_take_them(old: Path) -> None:
    for folder in (old / "whole", old / "tp" / "rank-01", old / "experts-only"):
        done = command("run", folder, "--tokens", 2, "--device", "cpu", "--json")
        assert done.document["ok"]
    assert command("verify", old / "ep", "--source", old / "source", "--json").document["ok"]
    refused = command("run", old / "tp", code=4)
    assert "holds the converted folders of several ranks" in " ".join(refused.stderr.split())


def test_they_are_not_resumed(old: Path) -> None:
    with pytest.raises(UsageError, match=r"differs in format \(1, not 2\)"):
        moectl.convert(old / "source", old / "whole", "moectl", resume=True)
    with pytest.raises(CheckpointError, match=r"rank-00/moectl.json is of format version 1"):
        moectl.convert(old / "source", old / "tp", "moectl", tp_size=2, resume=True)


def test_a_rank_of_version_2_must_be_named_by_what_is_above_it(old: Path) -> None:
    edit_manifest(old / "tp" / "rank-00", lambda document: document.update(format_version=2))
    with pytest.raises(CheckpointError, match="not named by a manifest of all ranks"):
        load_manifest(old / "tp" / "rank-00")


def test_the_index_of_version_1_is_expected_of_it(old: Path) -> None:
    assert json.loads((old / "experts-only" / "moectl.json").read_text())["rest"] == []
    edit_manifest(old / "experts-only", lambda document: document.update(format_version=2))
    with pytest.raises(CheckpointError, match=r"the documents are not config\.json, source\.config\.json"):
        load_manifest(old / "experts-only")
