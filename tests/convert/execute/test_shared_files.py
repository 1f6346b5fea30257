"""Directories made for servers: what engines open in them, what a rank reads, and how they are completed."""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import moectl
from moectl.checkpoint import open_checkpoint
from moectl.convert.execute import shared_files
from moectl.convert.execute.convert import convert
from moectl.convert.execute.rank_plans import (
    RankPlan,
    check_outputs,
    complete_ranks,
    convert_ranks,
    plan_ranks,
)
from moectl.convert.layouts.registry import layout_for
from moectl.convert.manifest.manifest import Deployment, load_directory, load_manifest
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.convert.rank_slice import shard_of
from moectl.convert.restore.unconvert import unconvert
from moectl.convert.restore.verify import verify
from moectl.convert.stream.file_transfers import announce
from moectl.convert.worker_partition import WorkerPartition
from moectl.errors import CheckpointError, UsageError
from moectl.files.lock import Lock
from moectl.integrations.model_experts import open_experts
from moectl.layer.prepare import load_prepared
from support.converted_folders import chosen_files, edit_manifest
from support.opened_paths import opened_path
from support.stream_checkpoints import folder_bytes, gpt_oss_checkpoint

DEPLOYMENTS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return gpt_oss_checkpoint(tmp_path / "source", num_hidden_layers=2, num_local_experts=2)


def plans_of(
    source: Path, out: Path, tp: int, ep: int, rank: int | None = None, **options: Any
) -> tuple[RankPlan, ...]:
    checkpoint = open_checkpoint(source)
    layout = layout_for("moectl", checkpoint.groups[0].problem.scheme.weight)
    return plan_ranks(out, tp, ep, rank, lambda s: plan_conversion(checkpoint, layout, shard=s, **options))


def converted(source: Path, out: Path, tp: int, ep: int, rank: int | None = None, **options: Any) -> Path:
    resume = options.pop("resume", False)
    plans = plans_of(source, out, tp, ep, rank, **options)
    check_outputs(source, out, plans, resume)
    convert_ranks(plans, lambda item, tell: convert(item.plan, item.folder, resume=resume, progress=tell))
    return out


@contextmanager
def opened_files(below: Path) -> Iterator[set[Path]]:
    """The files below a directory that the block opens, relative to it."""
    seen: set[Path] = set()

    def noting(opener: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, *more: Any, **named: Any) -> Any:
            if isinstance(path, (str, Path)):
                place = opened_path(path, named.get("dir_fd"))
                seen.update({place.relative_to(below)} if place.is_relative_to(below) else ())
            return opener(path, *more, **named)

        return opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", noting(os.open))
        patch.setattr(builtins, "open", noting(builtins.open))
        patch.setattr(io, "open", noting(io.open))
        yield seen
        announce(below, ()).result()  # after what was announced before: one thread does it in order


@pytest.mark.parametrize(("tp", "ep"), DEPLOYMENTS)
def test_the_index_names_the_rest_and_loaders_open_nothing_else(
    source: Path, tmp_path: Path, tp: int, ep: int
) -> None:
    out = converted(source, tmp_path / "out", tp, ep)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    rest = {name for name in open_checkpoint(source).tensors if ".mlp.experts." not in name}
    assert set(index["weight_map"]) == rest
    held = 0
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as opened:
            held += opened.get_tensor(name).nbytes
    assert held == index["metadata"]["total_size"]
    files = chosen_files(out)
    assert files == sorted(set(index["weight_map"].values()))
    (out / "model.safetensors.index.json").unlink()
    assert chosen_files(out) == files
    layers = list(out.rglob("moectl-layer-*"))
    assert len(layers) == 2 * tp * ep and {path.suffix for path in layers} == {".experts"}
    assert not list(out.rglob("rank-*/*.safetensors"))
    assert {path.name for path in out.iterdir()} - {path.name for path in source.iterdir()} >= {
        "moectl.json",
        "READY",
        "source.config.json",
        "source.model.safetensors.index.json",
    }
    assert len(list(out.rglob("READY"))) == 1 and (out / "tokenizer.json").exists()


@pytest.mark.parametrize(("tp", "ep"), DEPLOYMENTS)
def test_transformers_own_reading_of_the_index_opens_no_layer(
    source: Path, tmp_path: Path, tp: int, ep: int
) -> None:
    hub = pytest.importorskip("transformers.utils.hub", reason="transformers is not installed")
    out = converted(source, tmp_path / "out", tp, ep)
    index = str(out / "model.safetensors.index.json")
    files, metadata = hub.get_checkpoint_shard_files(str(out), index)
    assert sorted(Path(file).name for file in files) == chosen_files(out)
    assert not any(".experts." in name for name in metadata["all_checkpoint_keys"])


@pytest.mark.parametrize(("tp", "ep"), DEPLOYMENTS)
def test_a_rank_reads_its_own_bytes_and_what_all_share(
    source: Path, tmp_path: Path, tp: int, ep: int
) -> None:
    out = converted(source, tmp_path / "out", tp, ep)
    for rank in range(tp * ep):
        with opened_files(out) as seen:
            experts = open_experts(out)
            assert experts.layers == {0, 1} and experts.published["quant_method"] == "mxfp4"
            shard = shard_of(rank, tp, ep)
            for layer in (0, 1):
                prepared = experts.prepared(layer, torch.device("cpu"), "bf16", "torch", shard)
                assert prepared.problem == experts.problem_of(layer, shard)
        own = Path(f"rank-{rank:02d}") if tp * ep > 1 else Path()
        layers = {own / f"moectl-layer-0000{layer}.experts" for layer in (0, 1)}
        assert layers <= seen and Path("moectl.json") in seen
        below = {path for path in seen if len(path.parts) > 1}
        assert below <= layers | {own / "moectl.json"}
        rest = {path for path in seen if path.suffix == ".safetensors"}
        assert rest <= {Path(name) for name in chosen_files(out)}


def test_a_machine_needs_only_the_ranks_that_it_runs(source: Path, tmp_path: Path) -> None:
    out = converted(source, tmp_path / "out", 2, 2)
    shutil.rmtree(out / "rank-00")
    experts = open_experts(out)
    assert experts.layers == {0, 1}
    experts.prepared(0, torch.device("cpu"), "bf16", "torch", shard_of(3, 2, 2))
    with pytest.raises(CheckpointError, match="has no rank-00"):
        experts.problem_of(0, shard_of(0, 2, 2))
    with pytest.raises(
        UsageError, match=r"was converted for rank 0 of 4 \(tp 2, ep 2\), this is rank 0 of 4"
    ):
        experts.problem_of(0, shard_of(0, 4, 1))
    assert load_prepared(out, rank=2).first_expert == 1
    with pytest.raises(CheckpointError, match="lacks rank-00 of 4 ranks"):
        verify(out)


@pytest.mark.parametrize(("tp", "ep"), DEPLOYMENTS)
@pytest.mark.parametrize("experts_only", [False, True])
def test_the_source_comes_back(source: Path, tmp_path: Path, tp: int, ep: int, experts_only: bool) -> None:
    out = converted(source, tmp_path / "out", tp, ep, experts_only=experts_only)
    assert verify(out, source).ok
    assert (out / "model.safetensors.index.json").exists() == (not experts_only)
    assert chosen_files(out) == [] if experts_only else chosen_files(out)
    assert unconvert(out, tmp_path / "back").experts_only == experts_only
    back, before = folder_bytes(tmp_path / "back"), folder_bytes(source)
    if experts_only:
        assert back["config.json"] == before["config.json"]
    else:
        assert back == before


def test_ranks_converted_alone_are_completed_by_the_last(source: Path, tmp_path: Path) -> None:
    wanted = folder_bytes(converted(source, tmp_path / "all", 2, 1))
    out = converted(source, tmp_path / "out", 2, 1, rank=1)
    assert {path.name for path in out.iterdir()} == {"rank-01"}
    for read in (load_manifest, verify, open_experts):
        with pytest.raises(CheckpointError):
            read(out)
    with pytest.raises(CheckpointError, match=r"is not a finished converted directory.*--finish"):
        load_manifest(out / "rank-01")
    with pytest.raises(UsageError, match="has rank-01 already"):
        converted(source, out, 2, 1, rank=1)
    converted(source, out, 2, 1, rank=0)
    assert folder_bytes(out) == wanted
    with pytest.raises(UsageError, match="holds a conversion: it has READY"):
        check_outputs(source, out, plans_of(source, out, 2, 2, rank=2), resume=False)


def test_ranks_of_other_machines_are_put_together_by_finish(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for rank in (0, 1):
        converted(source, tmp_path / f"machine{rank}", 2, 1, rank=rank)
        if rank:
            with pytest.raises(UsageError, match="holds no parts of a conversion"):
                complete_ranks(plans_of(source, out, 2, 1))
        shutil.copytree(tmp_path / f"machine{rank}", out, dirs_exist_ok=True)
    complete_ranks(plans_of(source, out, 2, 1))
    assert folder_bytes(out) == folder_bytes(converted(source, tmp_path / "all", 2, 1))
    complete_ranks(plans_of(source, out, 2, 1))
    assert verify(out, source).ok


def test_parts_of_one_rank(source: Path, tmp_path: Path) -> None:
    out = converted(source, tmp_path / "out", 2, 1, rank=1)
    (plan,) = plans_of(source, out, 2, 1, rank=0)
    for number in (1, 2):
        convert(plan.plan, plan.folder, partition=WorkerPartition(number, 2))
    assert not (out / "READY").exists()
    complete_ranks([plan])
    assert folder_bytes(out) == folder_bytes(converted(source, tmp_path / "all", 2, 1))


def test_ranks_of_another_checkpoint_are_not_completed(source: Path, tmp_path: Path) -> None:
    out = converted(source, tmp_path / "out", 2, 1, rank=0)
    info = open_checkpoint(source).tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    data = bytearray((source / info.file).read_bytes())
    data[info.start] ^= 1
    (source / info.file).write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"rank-00 and rank-01 are not of one .* the bytes of the source"
    ):
        converted(source, out, 2, 1, rank=1)
    assert not (out / "READY").exists()
    shutil.rmtree(out / "rank-00")
    converted(source, out, 2, 1, rank=0)
    assert verify(out, source).ok


def test_ranks_of_another_deployment_are_not_completed(source: Path, tmp_path: Path) -> None:
    out = converted(source, tmp_path / "out", 1, 2, rank=0)
    with pytest.raises(UsageError, match=r"rank-00 holds rank 0 of 2 \(tp 1, ep 2\), not rank 0 of 2 \(tp 2"):
        converted(source, out, 2, 1, rank=1)


def test_a_rank_converted_again_by_another_version_is_named_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = converted(source, tmp_path / "out", 2, 1)
    shutil.rmtree(out / "rank-01")
    monkeypatch.setattr(
        "moectl.convert.execute.finish.producer", lambda: {"moectl": "of another day"}, raising=True
    )
    converted(source, out, 2, 1, resume=True)
    found = load_directory(out)
    assert isinstance(found, Deployment) and found.rank(1).record.producer == {"moectl": "of another day"}
    assert verify(out, source).ok


def test_another_process_may_complete_the_directory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks that end at the same time: one finds the log locked, and leaves the rest to the other."""
    out = converted(source, tmp_path / "out", 2, 1, rank=0)
    opened = shared_files.open_log

    def locked(folder: Path, *more: Any, **named: Any) -> Any:
        with (folder / "progress.jsonl").open("w") as file:
            Lock(folder / "progress.jsonl", file.fileno()).take()
            return opened(folder, *more, **named)

    monkeypatch.setattr(shared_files, "open_log", locked)
    converted(source, out, 2, 1, rank=1)
    assert (out / "rank-01" / "moectl.json").exists() and not (out / "READY").exists()
    monkeypatch.undo()
    converted(source, out, 2, 1, rank=1, resume=True)
    assert verify(out, source).ok


SHA = "0" * 64
TAMPERED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.update(tp_size=4), "there are 2 ranks with tp 4 and ep 1"),
    (lambda d: d.update(ep_size=-1), "there are 2 ranks with tp 2 and ep -1"),
    (lambda d: d.update(format_version=1), "version 1 has no manifest of all ranks"),
    (lambda d: d.update(format_version=7), "format version 7, this program reads 1 and 2"),
    (lambda d: d["ranks"][1].update(file="../rank-01/moectl.json"), "are not rank-00, rank-01"),
    (lambda d: d["ranks"][1].update(sha256="x"), "a rank's manifest is no SHA-256"),
    (lambda d: d["ranks"][1].update(sha256=SHA), "rank-01/moectl.json is not the one"),
    (lambda d: d.update(layers=[1, 0]), "not in ascending order"),
    (lambda d: d.update(layers=[0]), "differ in layers"),
    (lambda d: d["layout"].update(version=9), "differ in layout"),
    (lambda d: d["rest"][0].update(file="../x"), "is not a plain name"),
    (lambda d: d["documents"].pop(), "the documents are not"),
    (lambda d: d.update(surprise=1), "unknown fields surprise"),
    (lambda d: d.pop("experts"), "lacks experts"),
    (lambda d: d.update(ranks=[]), "there are 0 ranks"),
]


def test_what_is_above_the_ranks_is_checked(source: Path, tmp_path: Path) -> None:
    out = converted(source, tmp_path / "out", 2, 1)
    before = {name: (out / name).read_bytes() for name in ("moectl.json", "READY")}
    for change, words in TAMPERED:
        edit_manifest(out, change)
        with pytest.raises(CheckpointError) as refused:
            verify(out)
        assert words in str(refused.value)
        for name, data in before.items():
            (out / name).write_bytes(data)
    (out / "rank-01" / "READY").write_bytes(before["READY"])
    with pytest.raises(CheckpointError, match="does not hold the SHA-256"):
        load_manifest(out / "rank-01")


def test_damage_above_the_ranks_is_found(source: Path, tmp_path: Path) -> None:
    out = converted(source, tmp_path / "out", 1, 2)
    for name in ("tokenizer.json", "config.json", "moectl-rest-model-00001-of-00003.safetensors"):
        data = (out / name).read_bytes()
        (out / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        for folder in (out, out / "rank-01"):
            assert [text for text in verify(folder).findings if text.startswith(name)], name
        (out / name).write_bytes(data)
    assert verify(out).ok and verify(out / "rank-01").ok


def test_directories_nested_like_ranks_end_in_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(200):
        folder = folder / "rank-00"
        folder.mkdir()
        (folder / "moectl.json").write_text("{}")
    with pytest.raises(CheckpointError, match="READY is missing"):
        load_manifest(folder)


def test_the_python_function_converts_ranks(source: Path, tmp_path: Path) -> None:
    (first,) = moectl.convert(source, tmp_path / "out", "moectl", tp_size=2, rank=0)
    assert first.folder == tmp_path / "out" / "rank-00" and not (tmp_path / "out" / "READY").exists()
    moectl.convert(source, tmp_path / "out", "moectl", tp_size=2, rank=1)
    assert verify(tmp_path / "out", source).ok
