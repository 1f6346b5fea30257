"""Conversions that were killed or interrupted, and what resumes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moectl.convert.execute.convert import convert
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError, UsageError
from support.stream_checkpoints import folder_bytes

from ..conftest import Drive, assert_incomplete, interrupted, other_revision, plan_of, poke


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
