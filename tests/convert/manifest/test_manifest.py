"""Manifests are read with suspicion: every change is refused in words, and damage is found."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moectl.convert.execute.convert import convert
from moectl.convert.manifest.manifest import load_layer, load_manifest
from moectl.convert.manifest.manifest_records import (
    FORMAT_VERSION,
    DeploymentRecord,
    FileRecord,
    GroupRecord,
    LayerRecord,
    LayoutRecord,
    ManifestRecord,
    PassthroughRecord,
    RankRecord,
    RoleRecord,
    SourceFile,
    SourceRecord,
    SourceTensorRecord,
)
from moectl.convert.rank_slice import RankShard
from moectl.convert.restore.unconvert import unconvert
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError, MoectlError, UsageError
from moectl.files.records import field_kinds
from support.converted_folders import Edit, edit_manifest
from support.stream_checkpoints import folder_bytes

from ..conftest import ROOT, plan_of


def put(*path: str | int, value: Any) -> Edit:
    """An edit that sets one entry."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def drop(*path: str | int) -> Edit:
    """An edit that removes one entry."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


def test_a_manifest_holds_the_problem_and_the_sizes(converted: Path, gpt_oss: Path) -> None:
    manifest = load_manifest(converted)
    planned = plan_of(gpt_oss)
    assert manifest.problem == planned.groups[0].problem
    assert (manifest.problem.dims.hidden, manifest.problem.dims.padded_hidden) == (96, 256)
    assert manifest.layers == (0, 1, 2)
    assert manifest.layout.name == "marlin-mxfp4"
    document = json.loads((converted / "moectl.json").read_text())
    assert document["producer"]["torch"] == torch.__version__
    assert document["source"]["name"] == str(gpt_oss)
    with pytest.raises(CheckpointError, match="holds no layer 9; it has layers 0, 1, 2"):
        manifest.tensors(9)


@pytest.mark.parametrize("name", ["READY", "moectl.json"])
def test_an_incomplete_folder_is_refused(converted: Path, name: str) -> None:
    (converted / name).unlink()
    for read in (load_manifest, verify):
        with pytest.raises(CheckpointError, match=f"not complete: {name} is missing"):
            read(converted)
    with pytest.raises(CheckpointError, match=name):
        unconvert(converted, converted.parent / "back")
    assert not (converted.parent / "back").exists()


def test_the_next_step_is_one_that_works(converted: Path, tmp_path: Path) -> None:
    (converted / "READY").unlink()
    with pytest.raises(CheckpointError, match="again into an empty directory"):
        load_manifest(converted)
    (converted / "progress.jsonl").touch()
    with pytest.raises(CheckpointError, match="convert --resume"):
        load_manifest(converted)
    with pytest.raises(CheckpointError, match="there is no directory"):
        load_manifest(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["moectl.json", "READY", "moectl-layer-00001.experts"])
def test_a_pipe_is_refused_and_not_waited_for(converted: Path, name: str) -> None:
    (converted / name).unlink()
    os.mkfifo(converted / name)
    if name.startswith("moectl-layer"):
        assert any("pipe" in finding for finding in verify(converted).findings)
    else:
        with pytest.raises(CheckpointError, match="pipe"):
            load_manifest(converted)


def test_the_format_is_described_field_by_field() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    records = [
        ManifestRecord,
        RankRecord,
        DeploymentRecord,
        RankShard,
        SourceRecord,
        SourceFile,
        LayoutRecord,
    ]
    records += [GroupRecord, RoleRecord, SourceTensorRecord, LayerRecord, FileRecord, PassthroughRecord]
    fields = {name for record in records for name in field_kinds(record)}
    assert sorted(name for name in fields if f"`{name}`" not in text) == []
    assert f"format version {FORMAT_VERSION}; this moectl reads versions 1 and 2" in text


def test_an_ordinary_folder_is_refused(gpt_oss: Path) -> None:
    with pytest.raises(CheckpointError, match="not a finished converted directory"):
        load_manifest(gpt_oss)


def test_a_manifest_that_ready_does_not_sign(converted: Path) -> None:
    with (converted / "moectl.json").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match="does not hold the SHA-256"):
        load_manifest(converted)


GROUP = ("groups", 0)
W13 = (*GROUP, "roles", "w13")
PART = (*GROUP, "parts", "w13")
LAYER = ("layers", 1)
SHAPED = (*GROUP, "parts", "odd")
FLAT = {"step": "rearrange", "pattern": "e n b k -> n e b k", "sizes": {}}
ORPHAN = {
    "template": "model.layers.{layer}.odd",
    "role": "w7",
    "dtype": "U8",
    "shape": [5, 4],
    "raw": {"dtype": "U8", "shape": [4]},
    "rows": [0, 4],
    "shared": False,
    "chain": [],
    "values": [],
}
EXPERTS = "model.layers.1.mlp.experts."

TAMPERED: list[tuple[Edit, str]] = [
    (put("format_version", value=3), "format version 3, this program reads 1 and 2"),
    (put("format_version", value=True), "format_version must be a whole number"),
    (drop("experts_only"), "lacks experts_only"),
    (put("surprise", value=1), "unknown fields surprise"),
    (put(*GROUP, "problem", "experts", value="5"), "experts must be a whole number"),
    (put(*GROUP, "problem", "top_k", value=True), "top_k must be a whole number"),
    (put(*GROUP, "experts", value=[0, 6]), "expert range 0-6"),
    (put(*GROUP, "problem", "local_experts", value=2**31), "does not fit"),
    (put(*GROUP, "problem", "dims", "hidden", value=2**40), "hidden is 1099511627776"),
    (put(*GROUP, "problem", "top_k", value=0), "top_k is 0"),
    (put(*GROUP, "problem", "scheme", "weight", "block", value=[0, 32]), "shared by (0, 32) weights"),
    (put(*GROUP, "problem", "dtype", value="a/b"), "dtype is 'a/b'"),
    (put(*GROUP, "problem", "dims", "hidden", value=128), "shapes and dtypes of its problem"),
    (put(*LAYER, "file", value="../../etc/passwd"), "not a plain name"),
    (put(*LAYER, "file", value="/etc/passwd"), "not a plain name"),
    (put(*LAYER, "file", value="moectl-layer-00000.experts"), "listed twice"),
    (put("rest", 0, "file", value="moectl-layer-00000.experts"), "listed twice"),
    (put("rest", 0, "source", value="a/b"), "not a plain name"),
    (put("files", 0, "file", value="."), "not a plain name"),
    (put(*LAYER, "layer", value=7), "not the same layers"),
    (drop(*LAYER), "not the same layers"),
    (put(*LAYER, "sha256", f"{EXPERTS}w13_weight", value="0"), "no SHA-256"),
    (drop(*LAYER, "sha256", f"{EXPERTS}w2_weight"), "roles or parts are not those of its group"),
    (put(*LAYER, "source", "w2", "files", value=["other.safetensors"]), "impossible hash or file"),
    (put(*LAYER, "source", "w2", "sha256", value=[]), "must have 1 hashes"),
    (put(*W13, "shape", value=[5, -1, 48]), "no possible dtype and shape"),
    (put(*W13, "shape", value=[5, 128, 1 << 50]), "no possible dtype and shape"),
    (put(*W13, "dtype", value="F99"), "no possible dtype and shape"),
    (put(*W13, "shape", value=[5, 16, 511]), "not what its recipe gives"),
    (put(*W13, "shape", value=[4, 16, 512]), "not what its recipe gives"),
    (put(*W13, "made", "chain", value=[{"step": "exec"}]), "no known step"),
    (put(*W13, "made", "chain", value="rm"), "role w13.chain must be of type list"),
    (put(*PART, "rows", value=[0, 127]), "does not fill rows"),
    (put(*PART, "rows", value=[1, 128]), "does not fill rows"),
    (put(*PART, "shape", value=[5, 128, 3, 15]), "not as large as what is read"),
    (put(*PART, "role", value="w7"), "fill"),
    (put(*PART, "chain", value=[{"step": "exec"}]), "no known step"),
    (put(*PART, "chain", value=7), "a chain must be a list"),
    (put(*PART, "chain", value=[{"step": "view", "source": "U8", "target": "F32"}]), "does not fill rows"),
    (put(*PART, "values", value=7), "values of part w13 must be a list"),
    (put(*PART, "values", value=[{"value": "exec"}]), "no known value step"),
    (put(*PART, "chain", value=[FLAT]), "the expert axis must stay first and whole"),
    (put(*W13, "made", "chain", value=[FLAT]), "the expert axis must stay first and whole"),
    (put(*SHAPED, value=ORPHAN), "part odd fills role w7, which is none of the layer's"),
    (put(*PART, "template", value="model.layers.{layer}.mlp.experts.down_proj_blocks"), "share one name"),
]


@pytest.mark.parametrize(
    ("kind", "role", "before"),
    [
        ("roles", "w2_bias", [{"step": "view", "source": "BF16", "target": "U8"}]),
        ("parts", "w2_scale", []),
    ],
)
def test_a_chain_that_blows_up_is_refused_before_it_runs(
    converted: Path, kind: str, role: str, before: list[dict[str, str]]
) -> None:
    def blow_up(document: dict[str, Any]) -> None:
        place = document["groups"][0][kind][role]
        halvings = [{"step": "codes", "bits": 4, "unpack": False}] * 20
        (place["made"] if kind == "roles" else place)["chain"] = [
            *before,
            *[{"step": "codes", "bits": 4, "unpack": True}] * 20,
            *halvings,
        ]
        if kind == "roles":
            place["dtype"], place["shape"] = "U8", [5, 192]

    edit_manifest(converted, blow_up)
    with pytest.raises(CheckpointError, match="grows to more than 16 times"):
        load_manifest(converted)


@pytest.mark.parametrize(("change", "text"), TAMPERED, ids=[text for _, text in TAMPERED])
def test_a_signed_manifest_is_still_checked(converted: Path, change: Edit, text: str) -> None:
    edit_manifest(converted, change)
    for read in (load_manifest, verify):
        with pytest.raises(CheckpointError) as refused:
            read(converted)
        assert text in str(refused.value)


def test_deep_and_odd_documents(converted: Path) -> None:
    for data in (b"[" * 100_000, b"[]", b"\xff", b'{"a": 1, "a": 2}'):
        (converted / "moectl.json").write_bytes(data)
        (converted / "READY").write_text(hashlib.sha256(data).hexdigest() + "\n")
        with pytest.raises(CheckpointError):
            load_manifest(converted)


def test_a_layer_file_that_is_another_layers(converted: Path) -> None:
    files = [converted / f"moectl-layer-0000{i}.experts" for i in (0, 1)]
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(CheckpointError, match="does not match the manifest in "):
        load_layer(load_manifest(converted), 1)


def test_a_manifest_with_other_shapes_than_the_file(converted: Path) -> None:
    def swap(document: dict[str, Any]) -> None:
        role = document["groups"][0]["roles"]["w2_bias"]
        role["shape"] = [5, 96]
        role["made"]["chain"] = []

    edit_manifest(converted, swap)
    with pytest.raises(CheckpointError, match=r"w2_bias \(BF16 \[5, 96\] expected"):
        load_layer(load_manifest(converted), 0)


@pytest.mark.parametrize("check", [False, True])
def test_loading_a_damaged_layer(converted: Path, check: bool) -> None:
    path = converted / "moectl-layer-00002.experts"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    manifest = load_manifest(converted)
    if check:
        with pytest.raises(CheckpointError, match="fails its SHA-256 check"):
            load_layer(manifest, 2, check=True)
    else:
        assert load_layer(manifest, 2).keys() == manifest.tensors(2).keys()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"must have .* bytes, got"):
        load_layer(manifest, 2, check=check)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("READY", "moectl.json"))


def test_verify_finds_every_flipped_bit_and_lost_byte(converted: Path) -> None:
    before = folder_bytes(converted)
    for name in names(converted):
        path = converted / name
        path.unlink()
        path.write_bytes(before[name])
        for data in (before[name][:-1] + bytes([before[name][-1] ^ 1]), before[name][:-1], None):
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
            report = verify(converted)
            assert any(name in text for text in report.findings), (name, report.findings)
        path.write_bytes(before[name])
    assert verify(converted).ok


def test_verify_compares_with_the_source(converted: Path, gpt_oss: Path) -> None:
    assert verify(converted, gpt_oss).compared
    file = gpt_oss / "model-00002-of-00003.safetensors"
    data = file.read_bytes()
    at = data.index(b"}}") + 2000
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    report = verify(converted, gpt_oss)
    assert [text for text in report.findings if "differs from the source" in text]
    assert verify(converted).ok


def test_verify_notices_a_source_whose_tensor_is_shorter(converted: Path, gpt_oss: Path) -> None:
    (file,) = (path for path in gpt_oss.glob("*.safetensors") if path.name.startswith("model-00002"))
    tensors = load_file(file)
    name = max((name for name in tensors if "experts" in name), key=lambda name: tensors[name].nbytes)
    save_file({**tensors, name: tensors[name][:-1].clone()}, file)
    assert (
        f"{name} is not in the source's {file.name}, or has another size there"
        in verify(converted, gpt_oss).findings
    )


def test_verify_notices_another_chain(converted: Path) -> None:
    """A chain that keeps every shape gives other bytes back than the source had."""

    def flip(document: dict[str, Any]) -> None:
        document["groups"][0]["roles"]["w2"]["made"]["chain"].insert(0, {"step": "xor", "mask": 1})

    edit_manifest(converted, flip)
    report = verify(converted)
    assert any("does not have the SHA-256 of the source" in text for text in report.findings)
    back = converted.parent / "back"
    with pytest.raises(CheckpointError, match="does not have the SHA-256 of the source"):
        unconvert(converted, back)
    assert not back.exists()


def test_unconvert_refuses(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="never written to"):
        unconvert(converted, converted / "back")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        unconvert(converted, tmp_path / "full")
    rest = converted / "moectl-rest-model-00002-of-00003.safetensors"
    data = bytearray(rest.read_bytes())
    data[-1] ^= 1
    rest.write_bytes(data)
    with pytest.raises(MoectlError, match="fails its SHA-256 check"):
        unconvert(converted, tmp_path / "back")
    assert not list((tmp_path / "back").glob("*.partial"))


def test_a_resumed_folder_is_loaded_like_any(gpt_oss: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def stop(done: int, total: int, text: str) -> None:
        calls.append(done)
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan_of(gpt_oss), tmp_path / "out", progress=stop)
    with pytest.raises(CheckpointError, match="--resume"):
        load_manifest(tmp_path / "out")
    convert(plan_of(gpt_oss), tmp_path / "out", resume=True)
    assert verify(tmp_path / "out", gpt_oss).ok
