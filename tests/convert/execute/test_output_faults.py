"""Outputs that cannot be written: not empty, too small, full, or in use."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moectl.convert.execute.convert import convert
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError, ExitCode, Unavailable, UsageError
from moectl.files.sizes import size
from support.stream_checkpoints import folder_bytes, gpt_oss_checkpoint

from ..conftest import Drive, assert_incomplete, interrupted, plan_of


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
    with pytest.raises(UsageError, match="is the source directory itself"):
        convert(planned, gpt_oss)
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["notes"]
    assert not (gpt_oss / "out").exists()


def test_too_little_room_is_said_before_anything_is_created(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_of(gpt_oss)
    free = planned.disk_needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))
    with pytest.raises(Unavailable, match=f"{size(planned.disk_needed)} of disk are needed") as found:
        convert(planned, tmp_path / "out")
    assert "16.8 MB of it are set aside for the log, the manifest and small files." in found.value.reason
    assert not (tmp_path / "out").exists()


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
