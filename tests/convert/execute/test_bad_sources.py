"""Sources that are damaged, unreadable, or not what their headers say: refused by name, never written to."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moectl.convert.execute.convert import convert
from moectl.errors import CheckpointError, MoectlError
from support.opened_paths import opened_path
from support.stream_checkpoints import folder_bytes

from ..conftest import assert_incomplete, plan_of, poke


def test_a_file_cut_after_planning(gpt_oss: Path, tmp_path: Path) -> None:
    planned = plan_of(gpt_oss)
    path = gpt_oss / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        convert(planned, tmp_path / "out")
    assert_incomplete(tmp_path / "out")


@pytest.mark.parametrize("expert", [0, 4])
def test_a_nan_scale_is_refused_by_name(gpt_oss: Path, tmp_path: Path, expert: int) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    poke(gpt_oss, name, b"\xff", at=expert * 128 * 3 + 7)
    before = folder_bytes(gpt_oss)
    with pytest.raises(CheckpointError, match=f"layer 1, w13_scale .*{name}.*255"):
        convert(plan_of(gpt_oss), tmp_path / "out")
    assert_incomplete(tmp_path / "out")
    assert folder_bytes(gpt_oss) == before


def test_an_infinite_scale_is_refused_by_name(kimi: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.3.down_proj.weight_scale"
    poke(kimi, name, torch.tensor([float("inf")], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    with pytest.raises(CheckpointError, match="layer 2, w2_scale"):
        convert(plan_of(kimi), tmp_path / "out")
    assert_incomplete(tmp_path / "out")


def test_a_nan_weight_is_refused_by_name(tmp_path: Path) -> None:
    from moectl.synth import synthesize
    from support.invoking import moectl

    sizes = {"layers": 2, "experts": 4, "hidden": 256, "intermediate": 256}
    source = synthesize("mistralai/Mixtral-8x7B-v0.1", tmp_path / "source", **sizes)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    poke(source, name, b"\xc0\x7f")
    error = moectl("convert", source, tmp_path / "out", "--to", "int4-g128", code=4).stderr
    assert f"layer 1, expert 2: {name} has weights that are NaN or infinite" in error
    assert "leave the layer out" not in error
    assert_incomplete(tmp_path / "out")


def test_a_shape_tensor_that_contradicts_the_weight(kimi: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.1.up_proj.weight_shape"
    poke(kimi, name, b"\x07")
    with pytest.raises(CheckpointError, match=f"{name} says "):
        convert(plan_of(kimi), tmp_path / "out")
    assert_incomplete(tmp_path / "out")


def test_the_source_is_opened_for_reading_only(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Path, int]] = []
    plain = os.open

    def spy(path: Any, flags: int, *args: Any, **options: Any) -> int:
        opened.append((opened_path(path, options.get("dir_fd")), flags))
        return plain(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", spy)
    times = {path.name: path.stat().st_mtime_ns for path in gpt_oss.iterdir()}
    convert(plan_of(gpt_oss), tmp_path / "out")
    inside = [flags for path, flags in opened if path.is_relative_to(gpt_oss)]
    assert {path.name for path, _ in opened if path.parent == gpt_oss} == set(times)
    assert all(flags & os.O_ACCMODE == os.O_RDONLY for flags in inside)
    assert {path.name: path.stat().st_mtime_ns for path in gpt_oss.iterdir()} == times


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_a_read_error_in_the_middle(
    gpt_oss: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: dict[str, bytes],
    share: float,
    threads: int,
) -> None:
    before, plain = folder_bytes(gpt_oss), os.preadv
    reads = [0]

    def counted(fd: int, buffers: Any, offset: int) -> int:
        reads[0] += 1
        return plain(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    convert(plan_of(gpt_oss), tmp_path / "whole")
    last = int(reads[0] * share)
    reads[0] = 0

    def broken(fd: int, buffers: Any, offset: int) -> int:
        if reads[0] >= last:
            raise OSError(errno.EIO, "Input/output error")
        return counted(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"cannot read model-.*safetensors: Input/output error"):
        convert(plan_of(gpt_oss), tmp_path / "out", threads=threads)
    monkeypatch.undo()
    assert_incomplete(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.partial"))
    convert(plan_of(gpt_oss), tmp_path / "out", resume=True)
    assert folder_bytes(tmp_path / "out") == reference
    assert folder_bytes(gpt_oss) == before


def test_a_file_that_may_not_be_read(gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, plain = plan_of(gpt_oss), os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("model-00002-of-00003.safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors.*Permission denied"):
        convert(planned, tmp_path / "out")
    assert_incomplete(tmp_path / "out")


def test_a_converted_folder_is_not_converted(gpt_oss: Path, tmp_path: Path) -> None:
    convert(plan_of(gpt_oss), tmp_path / "out")
    with pytest.raises(MoectlError, match="convert"):
        plan_of(tmp_path / "out")
