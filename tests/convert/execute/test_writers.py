"""Two processes that write to one directory: one of them stops, and what is finished stays as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

import moectl.convert.execute.convert as convert_module
import moectl.files.output_folder as output_folder
from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import complete, convert
from moectl.convert.execute.rank_plans import convert_ranks, plan_ranks
from moectl.convert.execute.update_folder import plan_update, update_folder
from moectl.convert.manifest.progress_log import LOG
from moectl.convert.plan.conversion_plan import ConversionPlan
from moectl.convert.rank_slice import RankShard
from moectl.convert.restore.unconvert import unconvert
from moectl.convert.restore.verify import verify
from moectl.convert.worker_partition import parse_partition
from moectl.errors import MoectlError, Unavailable, UsageError
from moectl.files.access import Access
from support.sampling import every_nth
from support.stream_checkpoints import folder_bytes

from ..conftest import assert_incomplete, plan_of, poke

Work = Callable[[Path, Path], None]


def whole(target: str, resume: bool = False) -> Work:
    """A conversion by one process."""
    return lambda source, out: discard(convert(plan_of(source, target), out, resume=resume, threads=1))


def part(text: str, target: str = "marlin") -> Work:
    """One part of a conversion."""
    return lambda source, out: discard(
        convert(plan_of(source, target), out, partition=parse_partition(text), threads=1)
    )


def parts(source: Path, out: Path) -> None:
    """All parts, joined."""
    part("1/2")(source, out)
    part("2/2")(source, out)
    complete(plan_of(source), out)


def ranks(source: Path, out: Path) -> None:
    def plan(shard: RankShard) -> ConversionPlan:
        return plan_of(source, shard=shard)

    convert_ranks(
        plan_ranks(out, 2, 1, None, plan), lambda item, progress: convert(item.plan, item.folder, threads=1)
    )


def restored(source: Path, out: Path) -> None:
    """The source, from a conversion of it elsewhere."""
    elsewhere = out.with_name(f"for-{out.name}")
    if not elsewhere.exists():
        whole("marlin")(source, elsewhere)
    unconvert(elsewhere, out)


def discard(summary: object) -> None:
    """The result of a conversion is what it wrote."""


LATE = {
    "whole": whole("marlin"),
    "trtllm": whole("trtllm"),
    "trtllm, resumed": whole("trtllm", resume=True),
    "part": part("1/3"),
    "part of trtllm": part("2/2", "trtllm"),
    "ranks": ranks,
    "unconvert": restored,
}
EARLY = {"marlin": whole("marlin"), "parts": parts, "ranks": ranks, "unconvert": restored}


@pytest.mark.parametrize(("early", "late"), every_nth(itertools.product(EARLY, LATE), 2))
def test_a_finished_directory_is_not_overwritten_by_who_began_before(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: str, late: str
) -> None:
    """The late one has checked an empty directory, and waits there until the other has finished."""
    out, plain = tmp_path / "out", convert_module.create_folder
    finished: dict[str, bytes] = {}

    def wait(folder: Path, access: Access) -> None:
        monkeypatch.undo()
        EARLY[early](gpt_oss, out)
        finished.update(folder_bytes(out))
        plain(folder)

    if late == "unconvert":
        whole("marlin")(gpt_oss, tmp_path / "for-out")
    for module in (convert_module, output_folder):
        monkeypatch.setattr(module, "create_folder", wait)
    with pytest.raises(MoectlError, match=r"has finished in|has written to|holds"):
        LATE[late](gpt_oss, out)
    assert finished and folder_bytes(out) == finished
    if early != "unconvert":
        assert verify(out, gpt_oss).ok


def test_who_resumes_stops_if_another_has_finished_and_was_killed_before_its_log_was_removed(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain = tmp_path / "out", convert_module.create_folder
    finished: dict[str, bytes] = {}

    def interrupt(done: int, total: int, text: str) -> None:
        if list(out.glob("*.experts")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan_of(gpt_oss), out, progress=interrupt, threads=1)

    def wait(folder: Path, access: Access) -> None:
        monkeypatch.undo()
        log = (out / LOG).read_bytes()
        whole("marlin", resume=True)(gpt_oss, out)
        (out / LOG).write_bytes(log)
        finished.update(folder_bytes(out))
        plain(folder)

    monkeypatch.setattr(convert_module, "create_folder", wait)
    with pytest.raises(Unavailable, match="another conversion has finished in"):
        whole("marlin", resume=True)(gpt_oss, out)
    assert finished and folder_bytes(out) == finished
    whole("marlin", resume=True)(gpt_oss, out)
    assert verify(out, gpt_oss).ok


@pytest.mark.parametrize("late", [*LATE, "the other part"])
def test_who_finds_another_at_work_stops(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The first part is written between the other's checks and its log."""
    out, plain = tmp_path / "out", convert_module.create_folder
    work = LATE.get(late, part("2/2"))

    def wait(folder: Path, access: Access) -> None:
        monkeypatch.undo()
        part("1/2")(gpt_oss, out)
        plain(folder)

    if late == "unconvert":
        whole("marlin")(gpt_oss, tmp_path / "for-out")
    for module in (convert_module, output_folder):
        monkeypatch.setattr(module, "create_folder", wait)
    if late == "the other part":
        work(gpt_oss, out)
    else:
        with pytest.raises(MoectlError):
            work(gpt_oss, out)
        assert_incomplete(out)
        part("2/2")(gpt_oss, out)
    complete(plan_of(gpt_oss), out)
    convert(plan_of(gpt_oss), tmp_path / "reference")
    left = {name: data for name, data in folder_bytes(out).items() if not name.startswith("rank-")}
    assert left == folder_bytes(tmp_path / "reference")
    assert verify(out, gpt_oss).ok


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("then", ["--finish", "--resume", "--part --resume", "refit"])
def test_logs_of_parts_beside_ready_go_with_the_next_command(
    gpt_oss: Path, tmp_path: Path, left: int, then: str
) -> None:
    """As a kill between the removal of one and the next leaves them."""
    out = tmp_path / "out"
    for text in ("1/3", "2/3", "3/3"):
        part(text)(gpt_oss, out)
    logs = {path: path.read_bytes() for path in sorted(out.glob("progress-*"))[left:]}
    complete(plan_of(gpt_oss), out)
    for path, data in logs.items():
        path.write_bytes(data)
    assert verify(out, gpt_oss).ok
    if then == "--finish":
        complete(plan_of(gpt_oss), out)
    elif then == "refit":
        poke(gpt_oss, "model.layers.1.mlp.experts.down_proj_blocks", b"\x05\x06")
        update_folder(plan_update(out, open_checkpoint(gpt_oss)))
    else:
        partition = parse_partition("2/3") if then.startswith("--part") else None
        convert(plan_of(gpt_oss), out, resume=True, partition=partition)
    assert not list(out.glob("progress*"))
    assert verify(out, gpt_oss).ok


def test_an_update_does_not_touch_what_another_has_just_finished(gpt_oss: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole("marlin")(gpt_oss, out)
    poke(gpt_oss, "model.layers.1.mlp.experts.down_proj_blocks", b"\x05\x06")
    first, second = (plan_update(out, open_checkpoint(gpt_oss)) for _ in range(2))
    update_folder(first)
    before = folder_bytes(out)
    with pytest.raises(Unavailable, match="has just finished"):
        update_folder(second)
    assert folder_bytes(out) == before and verify(out, gpt_oss).ok


def test_an_update_waits_for_nobody(gpt_oss: Path, tmp_path: Path) -> None:
    """Two at once: the second stops, and the first goes on."""
    out, refused = tmp_path / "out", []
    whole("marlin")(gpt_oss, out)
    poke(gpt_oss, "model.layers.1.mlp.experts.down_proj_blocks", b"\x05\x06")
    first, second = (plan_update(out, open_checkpoint(gpt_oss)) for _ in range(2))

    def meddle(done: int, total: int, text: str) -> None:
        if not refused:
            with pytest.raises(MoectlError) as caught:
                update_folder(second)
            refused.append(str(caught.value))

    update_folder(first, progress=meddle)
    assert "another update is writing" in refused[0]
    assert verify(out, gpt_oss).ok


def test_ranks_and_a_whole_conversion_do_not_share_a_directory(gpt_oss: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def meddle(done: int, total: int, text: str) -> None:
        with pytest.raises(UsageError, match="holds something that is not of ranks"):
            ranks(gpt_oss, out)

    convert(plan_of(gpt_oss), out, progress=meddle)
    assert verify(out, gpt_oss).ok
