"""A source that is changed or replaced while it is converted ends the conversion, without READY."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import moectl
from moectl.convert.execute.convert import complete, convert
from moectl.convert.execute.rank_plans import convert_ranks, plan_ranks
from moectl.convert.plan.conversion_plan import ConversionPlan
from moectl.convert.plan.source_pin import MOST_SMALL_FILES, SAMPLE_BYTES, SAMPLES, pin_source, sampled
from moectl.convert.rank_slice import RankShard
from moectl.convert.restore.verify import verify
from moectl.convert.worker_partition import parse_partition
from moectl.errors import CheckpointError, MoectlError, UsageError
from support.stream_checkpoints import folder_bytes

from ..conftest import assert_incomplete, other_revision, plan_of, poke

FILE = "model-00002-of-00003.safetensors"


def replaced(source: Path, name: str) -> None:
    """Another file with the same bytes under the same name, as a download of the same revision makes it."""
    shutil.copy(source / name, source / "new")
    (source / "new").replace(source / name)


def renamed(source: Path, name: str) -> None:
    """The directory gives its name to one of another revision."""
    other_revision(source, source.with_name("new"))
    source.rename(source.with_name("old"))
    source.with_name("new").rename(source)


def written(source: Path, name: str) -> None:
    """A byte written in place, and the time of modification set back."""
    status = (source / name).stat()
    with (source / name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(source / name, ns=(status.st_atime_ns, status.st_mtime_ns))


def gone(source: Path, name: str) -> None:
    (source / name).unlink()


CHANGES: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "a file replaced": (replaced, FILE),
    "the directory replaced": (renamed, ""),
    "a byte, its time set back": (written, FILE),
    "the tokenizer": (replaced, "tokenizer.json"),
    "the index": (replaced, "model.safetensors.index.json"),
    "the config": (replaced, "config.json"),
    "a file of other tensors": (replaced, "model-00003-of-00003.safetensors"),
    "a file removed": (gone, "tokenizer.json"),
}


def meddling(change: Callable[[], None], at: float) -> Callable[[int, int, str], None]:
    """A progress callback that makes a `change` once when a share `at` of the work is done."""
    left = [change]

    def progress(done: int, total: int, text: str) -> None:
        if left and done >= at * total:
            left.pop()()

    return progress


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_source_changed_in_the_middle(gpt_oss: Path, tmp_path: Path, kind: str, at: float) -> None:
    change, name = CHANGES[kind]
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="changed after the conversion was planned") as caught:
        convert(plan_of(gpt_oss), out, progress=meddling(lambda: change(gpt_oss, name), at))
    assert name in str(caught.value)
    assert_incomplete(out)
    with pytest.raises(CheckpointError, match="not a finished converted directory"):
        verify(out)


def test_a_config_changed_after_planning(gpt_oss: Path, tmp_path: Path) -> None:
    plan = plan_of(gpt_oss)
    config = json.loads((gpt_oss / "config.json").read_text())
    (gpt_oss / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    with pytest.raises(CheckpointError, match=r"config\.json of .* changed after"):
        convert(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_converted_before_is_kept_when_it_is_the_same(gpt_oss: Path, tmp_path: Path) -> None:
    """A file replaced by itself: nothing wrong was written, so that resuming finds all of it right."""
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="changed after"):
        convert(plan_of(gpt_oss), out, progress=meddling(lambda: replaced(gpt_oss, FILE), 0.5))
    assert convert(plan_of(gpt_oss), out, resume=True).converted == ()
    convert(plan_of(gpt_oss), tmp_path / "reference")
    assert folder_bytes(out) == folder_bytes(tmp_path / "reference")


def test_parts_of_two_revisions_are_not_joined(gpt_oss: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(gpt_oss, other)
    poke(other, "model.layers.2.mlp.experts.down_proj_blocks", b"\x01\x02\x03")
    for source, part in ((gpt_oss, "1/2"), (other, "2/2")):
        convert(plan_of(source), out, partition=parse_partition(part))
    for source in (gpt_oss, other):
        plan = plan_of(source)
        if source == other:  # the layers of the first part have the same bytes there, so nothing is mixed
            assert complete(plan, out).folder == out
            assert verify(out, other).ok
        else:
            with pytest.raises(UsageError, match=r"started with another checkpoint: .*down_proj_blocks"):
                complete(plan, out)
            assert_incomplete(out)


def test_parts_of_copies_are_joined(gpt_oss: Path, tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    shutil.copytree(gpt_oss, copy)
    for source, part in ((copy, "1/2"), (gpt_oss, "2/2")):
        convert(plan_of(source), out, partition=parse_partition(part))
    complete(plan_of(gpt_oss), out)
    assert verify(out, gpt_oss).ok and not list(out.glob("progress*"))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_ranks_of_two_revisions_are_not_joined(gpt_oss: Path, tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Ranks that hold different experts have no byte in common that could be compared."""
    out, other = tmp_path / "out", other_revision(gpt_oss, tmp_path / "other")

    def one(source: Path, rank: int) -> None:
        def plan(shard: RankShard) -> ConversionPlan:
            return plan_of(source, shard=shard)

        plans = plan_ranks(out, *sizes, rank, plan)
        convert_ranks(plans, lambda item, progress: convert(item.plan, item.folder, progress=progress))

    one(gpt_oss, 0)
    with pytest.raises(MoectlError, match=r"rank-00.*(another checkpoint|not of one conversion)"):
        one(other, 1)
    assert_incomplete(out)
    with pytest.raises(CheckpointError):
        verify(out)


def test_a_pin_is_of_every_file_that_is_used(gpt_oss: Path) -> None:
    plan = plan_of(gpt_oss)
    pinned = pin_source(plan.checkpoint, gpt_oss)
    assert set(pinned.files) == {path.name for path in gpt_oss.iterdir()}
    pinned.check()
    assert pin_source(plan.checkpoint, gpt_oss).digest == pinned.digest
    os.utime(gpt_oss / FILE)
    assert pin_source(plan.checkpoint, gpt_oss).digest != pinned.digest


def test_samples_begin_and_end_where_the_tensors_do() -> None:
    for end in (10, 1 << 18, (1 << 18) + 9000, 10**6, 10**12):
        ranges = sampled(8, end)
        assert ranges[0][0] == 8 and ranges[-1][1] == end
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
        assert ranges == [(8, end)] or len(ranges) == SAMPLES
        assert ranges == [(8, end)] or {last - first for first, last in ranges} == {SAMPLE_BYTES}


def test_a_folder_of_very_many_files_is_refused_before_anything_is_written(
    tiny_gpt_oss: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_gpt_oss, tmp_path / "source")
    for number in range(MOST_SMALL_FILES + 1):
        (source / f"note-{number}.txt").touch()
    with pytest.raises(CheckpointError, match=rf"files beside the weights, at most {MOST_SMALL_FILES} are"):
        moectl.convert(source, tmp_path / "out", "marlin")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
