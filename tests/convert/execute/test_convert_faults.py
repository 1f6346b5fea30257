"""What goes wrong while converting: damage, full disks, kills, and how a conversion is resumed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moectl.checkpoint import open_checkpoint, read_header
from moectl.convert.execute.convert import convert
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError, ExitCode, MoectlError, Unavailable, UsageError
from moectl.files.atomic import replacing, write_exactly
from support.opened_paths import opened_path
from support.sampling import every_nth
from support.stream_checkpoints import folder_bytes, gpt_oss_checkpoint

from ..conftest import plan_of

Drive = Callable[..., tuple[int, dict[str, Any]]]


def poke(folder: Path, name: str, value: bytes, at: int = 0) -> None:
    """Overwrites bytes of a tensor in its file."""
    info = open_checkpoint(folder).tensors[name]
    with (folder / info.file).open("r+b") as file:
        file.seek(info.start + at)
        file.write(value)


def assert_incomplete(out: Path) -> None:
    """No READY, no manifest, and no file under its own name that is not whole."""
    assert not (out / "READY").exists()
    assert not (out / "moectl.json").exists()


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


def test_a_shape_tensor_that_contradicts_the_weight(kimi: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.1.up_proj.weight_shape"
    poke(kimi, name, b"\x07")
    with pytest.raises(CheckpointError, match=f"{name} says "):
        convert(plan_of(kimi), tmp_path / "out")
    assert_incomplete(tmp_path / "out")


def test_the_output_must_be_empty_and_elsewhere(gpt_oss: Path, tmp_path: Path) -> None:
    planned = plan_of(gpt_oss)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(UsageError, match="not empty: it holds notes"):
        convert(planned, tmp_path / "full")
    with pytest.raises(UsageError, match="no conversion to resume"):
        convert(planned, tmp_path / "full", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        convert(planned, tmp_path / "file")
    (tmp_path / "link").symlink_to(gpt_oss)
    for inside in (gpt_oss, gpt_oss / "out", tmp_path / "link" / "deep" / "out"):
        with pytest.raises(UsageError, match="never written to"):
            convert(planned, inside)
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["notes"]
    assert not (gpt_oss / "out").exists()


def test_too_little_room_is_said_before_anything_is_created(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_of(gpt_oss)
    free = planned.disk_needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))
    with pytest.raises(Unavailable, match=f"{planned.disk_needed} bytes of disk are needed"):
        convert(planned, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def reference(gpt_oss: Path, tmp_path: Path) -> dict[str, bytes]:
    """What a conversion that nothing disturbs writes."""
    convert(plan_of(gpt_oss), tmp_path / "reference")
    return folder_bytes(tmp_path / "reference")


@pytest.mark.parametrize(
    ("signal", "status", "at"),
    [("SIGKILL", -9, at) for at in (0.0, 0.1, 0.4, 1.0)] + [("SIGINT", 130, at) for at in (0.1, 0.7)],
)
def test_killed_or_interrupted_then_resumed(
    gpt_oss: Path,
    tmp_path: Path,
    reference: dict[str, bytes],
    drive: Drive,
    signal: str,
    status: int,
    at: float,
) -> None:
    out, before = tmp_path / "out", folder_bytes(gpt_oss)
    code, _ = drive(source=gpt_oss, out=out, target="marlin", signal=signal, at=at)
    assert code == status
    assert_incomplete(out)
    assert signal == "SIGKILL" or not list(out.glob("*.partial"))
    with pytest.raises(UsageError, match="--resume"):
        convert(plan_of(gpt_oss), out)
    summary = convert(plan_of(gpt_oss), out, resume=True)
    assert sorted((*summary.converted, *summary.resumed)) == [0, 1, 2]
    assert at < 0.4 or summary.resumed
    assert folder_bytes(out) == reference
    assert folder_bytes(gpt_oss) == before
    assert verify(out, gpt_oss).ok


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_file_that_may_not_grow(
    gpt_oss: Path, tmp_path: Path, reference: dict[str, bytes], drive: Drive, share: float
) -> None:
    out = tmp_path / "out"
    largest = max(len(data) for data in reference.values())
    code, outcome = drive(source=gpt_oss, out=out, target="marlin", file_size=int(largest * share))
    assert (code, outcome["kind"]) == (ExitCode.UNAVAILABLE, "Unavailable"), outcome
    assert "--resume" in outcome["error"]
    assert_incomplete(out)
    assert not list(out.glob("*.partial"))
    convert(plan_of(gpt_oss), out, resume=True)
    assert folder_bytes(out) == reference


def test_a_disk_that_fills_up(tmp_path: Path, drive_alone: Drive) -> None:
    unshare = ["unshare", "--mount", "--map-root-user"]
    probe = subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True)
    if probe.returncode:
        pytest.skip(
            "this user may not mount a small file system; test_a_file_that_may_not_grow goes the same way"
        )
    source = gpt_oss_checkpoint(tmp_path / "source", num_local_experts=16)
    out = tmp_path / "out"
    out.mkdir()
    shell = f'mount -t tmpfs -o size=1m none "{out}" && "$@"; s=$?; ls -A "{out}" >&2; exit $s'
    prefix = [*unshare, "sh", "-c", shell, "sh"]
    code, outcome = drive_alone(*prefix, source=source, out=out, target="marlin", hide_disk_usage=True)
    assert (code, outcome["kind"]) == (ExitCode.UNAVAILABLE, "Unavailable"), outcome
    assert "the disk is full" in outcome["error"]


def interrupted(source: Path, out: Path, drive: Drive) -> None:
    """A conversion killed after its first layer."""
    assert drive(source=source, out=out, target="marlin", signal="SIGKILL", at=0.5)[0] == -9


def test_a_damaged_finished_layer_is_converted_again(
    gpt_oss: Path, tmp_path: Path, reference: dict[str, bytes], drive: Drive
) -> None:
    out = tmp_path / "out"
    interrupted(gpt_oss, out, drive)
    layer = out / "moectl-layer-00000.experts"
    data = bytearray(layer.read_bytes())
    data[-3] ^= 1
    layer.write_bytes(data)
    summary = convert(plan_of(gpt_oss), out, resume=True)
    assert 0 in summary.converted
    assert folder_bytes(out) == reference


def test_a_log_line_cut_short_is_dropped(
    gpt_oss: Path, tmp_path: Path, reference: dict[str, bytes], drive: Drive
) -> None:
    out = tmp_path / "out"
    interrupted(gpt_oss, out, drive)
    log = out / "progress.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    convert(plan_of(gpt_oss), out, resume=True)
    assert folder_bytes(out) == reference


def test_a_log_cut_within_its_first_line(gpt_oss: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "progress.jsonl").write_bytes(b'{"conversion": {"for')
    convert(plan_of(gpt_oss), out, resume=True)
    assert folder_bytes(out) == reference


def test_resuming_another_conversion_is_refused(gpt_oss: Path, tmp_path: Path, drive: Drive) -> None:
    out = tmp_path / "out"
    interrupted(gpt_oss, out, drive)
    before = folder_bytes(out)
    with pytest.raises(UsageError, match="holds a marlin-mxfp4 conversion, not trtllm-mxfp4"):
        convert(plan_of(gpt_oss, "trtllm"), out, resume=True)
    with pytest.raises(UsageError, match=r"differs in experts only \(no, not yes\)\."):
        convert(plan_of(gpt_oss, experts_only=True), out, resume=True)
    assert folder_bytes(out) == before


def test_a_log_that_nobody_wrote(gpt_oss: Path, tmp_path: Path, drive: Drive) -> None:
    out = tmp_path / "out"
    interrupted(gpt_oss, out, drive)
    log = out / "progress.jsonl"
    good = log.read_bytes()
    for line in (b"[1]\n", b'{"layer": {"layer": true}}\n', b'{"what": 1}\n'):
        log.write_bytes(good + line)
        with pytest.raises(CheckpointError, match=r"progress\.jsonl"):
            convert(plan_of(gpt_oss), out, resume=True)


def test_resuming_a_finished_conversion_does_nothing(
    gpt_oss: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    (tmp_path / "reference" / "progress.jsonl").write_text("left by a kill after READY")
    summary = convert(plan_of(gpt_oss), tmp_path / "reference", resume=True)
    assert (summary.converted, summary.resumed) == ((), (0, 1, 2))
    assert folder_bytes(tmp_path / "reference") == reference
    with pytest.raises(UsageError, match="holds a marlin-mxfp4 conversion, not moectl-mtile64"):
        convert(plan_of(gpt_oss, "moectl"), tmp_path / "reference", resume=True)


def other_revision(source: Path, target: Path) -> Path:
    """A checkpoint with the same names, shapes, headers and config, and one other byte in each file."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        with file.open("rb") as data:
            infos = read_header(data, file.stat().st_size, file.name)
        whole = bytearray(file.read_bytes())
        for info in infos.values():
            if info.name.endswith("_blocks"):
                whole[info.start] ^= 1
        file.write_bytes(whole)
    return target


def test_a_conversion_is_not_resumed_with_another_revision(
    gpt_oss: Path, tmp_path: Path, drive: Drive, reference: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    interrupted(gpt_oss, out, drive)
    other = other_revision(gpt_oss, tmp_path / "other")
    with pytest.raises(UsageError, match=r"started with another checkpoint: .*_blocks differ"):
        convert(plan_of(other), out, resume=True)
    assert not (out / "READY").exists()
    same = tmp_path / "same"
    shutil.copytree(gpt_oss, same)
    convert(plan_of(same), out, resume=True)
    assert verify(out, gpt_oss).ok
    with pytest.raises(UsageError, match="started with another checkpoint"):
        convert(plan_of(other), out, resume=True)


def test_a_finished_conversion_is_that_of_one_checkpoint(gpt_oss: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(plan_of(gpt_oss), out)
    before = folder_bytes(out)
    for number, name in enumerate(("model.layers.1.mlp.router.weight", "model.norm.weight")):
        other = tmp_path / str(number)
        shutil.copytree(gpt_oss, other)
        poke(other, name, b"\x01\x02")
        with pytest.raises(UsageError, match=r"another checkpoint: .*\.safetensors differ"):
            convert(plan_of(other), out, resume=True)
    other = tmp_path / "other"
    shutil.copytree(gpt_oss, other)
    with (other / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match=r"holds another conversion; it differs in config\."):
        convert(plan_of(other), out, resume=True)
    with pytest.raises(UsageError, match=r"differs in experts only \(no, not yes\)\."):
        convert(plan_of(gpt_oss, experts_only=True), out, resume=True)
    assert folder_bytes(out) == before


@pytest.mark.parametrize("name", ["progress.jsonl", "moectl-layer-00000.experts"])
def test_a_pipe_in_the_output_is_not_waited_for(
    gpt_oss: Path, tmp_path: Path, drive: Drive, reference: dict[str, bytes], name: str
) -> None:
    out = tmp_path / "out"
    interrupted(gpt_oss, out, drive)
    (out / name).unlink()
    os.mkfifo(out / name)
    if name == "progress.jsonl":
        with pytest.raises(CheckpointError, match="is not a file"):
            convert(plan_of(gpt_oss), out, resume=True)
    else:
        convert(plan_of(gpt_oss), out, resume=True)
        assert folder_bytes(out) == reference


def test_only_a_refused_write_is_the_outputs_fault(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError), replacing(path, 3):
        (tmp_path / "elsewhere").read_bytes()
    assert not list(tmp_path.iterdir())


def test_a_refused_write_names_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with (
        pytest.raises(Unavailable, match="cannot write first, which needs 3 bytes: the disk is full"),
        replacing(tmp_path / "first", 3) as fd,
        replacing(tmp_path / "second", 5),
    ):
        monkeypatch.setattr(os, "pwrite", full)
        write_exactly(fd, memoryview(b"abc"), 0)
    assert not list(tmp_path.iterdir())


def test_two_conversions_into_one_folder(gpt_oss: Path, tmp_path: Path) -> None:
    planned = plan_of(gpt_oss)
    refused: list[str] = []

    def meddle(done: int, total: int, text: str) -> None:
        if not refused:
            with pytest.raises(Unavailable) as caught:
                convert(planned, tmp_path / "out", resume=True)
            refused.append(str(caught.value))

    convert(planned, tmp_path / "out", progress=meddle)
    assert "another conversion is writing" in refused[0]
    assert verify(tmp_path / "out").ok


def test_an_output_that_cannot_be_created(gpt_oss: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot create"):
        convert(plan_of(gpt_oss), tmp_path / "file" / "out")


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


BOUND = 72 << 20
"""Bytes of memory for a layer of more than four times as many."""


@pytest.fixture(scope="module")
def large_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss_checkpoint(
        tmp_path_factory.mktemp("large") / "source",
        num_hidden_layers=1,
        num_local_experts=192,
        hidden_size=1024,
        intermediate_size=1024,
    )


@pytest.mark.parametrize("target", every_nth(["moectl", "marlin"], 2))
def test_memory_stays_under_the_bound(
    large_layer: Path, tmp_path: Path, drive_alone: Drive, target: str
) -> None:
    """A layer larger than its bound: what is resident above the start stays under it."""
    code, outcome = drive_alone(source=large_layer, out=tmp_path / "out", target=target, max_memory=BOUND)
    assert code == 0, outcome
    assert outcome["layer"] > 4 * BOUND
    assert 0 < outcome["above"] <= outcome["planned"] <= BOUND, outcome
    shutil.rmtree(tmp_path / "out")


def test_more_memory_is_used_and_seen(large_layer: Path, tmp_path: Path, drive_alone: Drive) -> None:
    """The measure of the tests above sees what a larger batch holds."""
    code, outcome = drive_alone(
        source=large_layer, out=tmp_path / "free", target="marlin", max_memory=1 << 30
    )
    assert code == 0
    assert outcome["above"] > BOUND
    shutil.rmtree(tmp_path / "free")


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
