"""Resume logs are read with suspicion: what one says that was not planned is done again or refused."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moectl.convert.execute.convert import complete, convert
from moectl.convert.manifest.progress_log import LogEntry, log_entry, log_line, open_log
from moectl.convert.worker_partition import WorkerPartition
from moectl.errors import CheckpointError, Unavailable, UsageError
from support.stream_checkpoints import folder_bytes

from ..conftest import plan_of

Edit = Callable[[dict[str, Any]], None]

SOURCE = ("layer", "source", "w13_scale")


def changed(*path: str, value: Any) -> Edit:
    """An edit that sets one entry of a line, or with `...` removes it."""

    def change(line: dict[str, Any]) -> None:
        place = line
        for key in path[:-1]:
            place = place[key]
        if value is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return change


def edit(log: Path, kind: str, change: Edit) -> None:
    """Applies `change` to the last line about a layer, or a file of other tensors."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        del line["sha256"]
    change([line for line in lines if kind in line][-1])
    log.write_bytes(b"".join(map(log_line, lines)))


EDITS = {
    "a part is missing": changed(*SOURCE, value=...),
    "a part more": changed("layer", "source", "odd", value={"sha256": [], "files": []}),
    "no hashes": changed(*SOURCE, "sha256", value=[]),
    "a hash more": changed(*SOURCE, "sha256", value=["0" * 64] * 2),
    "another file": changed(*SOURCE, "files", value=["../x"]),
    "another size": changed("layer", "size", value=1),
    "slices": changed("layer", "slices", value={"w13": "0" * 64}),
}


@pytest.fixture
def stopped(gpt_oss: Path, tmp_path: Path) -> Path:
    """A conversion that was interrupted when all but the manifest was written."""

    def stop(done: int, total: int, text: str) -> None:
        if text == "manifest":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan_of(gpt_oss), tmp_path / "stopped", progress=stop)
    return tmp_path / "stopped"


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
def test_a_layer_that_is_logged_otherwise_than_planned_is_converted_again(
    gpt_oss: Path, tmp_path: Path, stopped: Path, change: Edit
) -> None:
    convert(plan_of(gpt_oss), tmp_path / "out")
    edit(stopped / "progress.jsonl", "layer", change)
    summary = convert(plan_of(gpt_oss), stopped, resume=True)
    assert (summary.converted, summary.resumed) == ((2,), (0, 1))
    assert folder_bytes(stopped) == folder_bytes(tmp_path / "out")


@pytest.mark.parametrize(("field", "value"), [("source", "../x"), ("whole", False)])
def test_another_file_that_is_logged_otherwise_than_planned_is_made_again(
    gpt_oss: Path, tmp_path: Path, stopped: Path, field: str, value: object
) -> None:
    convert(plan_of(gpt_oss), tmp_path / "out")
    edit(stopped / "progress.jsonl", "rest", changed("rest", field, value=value))
    convert(plan_of(gpt_oss), stopped, resume=True)
    assert folder_bytes(stopped) == folder_bytes(tmp_path / "out")


def test_a_part_that_is_logged_otherwise_than_planned_is_missing(gpt_oss: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (1, 2):
        convert(plan_of(gpt_oss), out, partition=WorkerPartition(number, 2))
    edit(out / WorkerPartition(2, 2).log, "layer", EDITS["a part is missing"])
    with pytest.raises(UsageError, match="part 2/2 lacks layer 2"):
        complete(plan_of(gpt_oss), out)
    convert(plan_of(gpt_oss), out, partition=WorkerPartition(2, 2), resume=True)
    assert complete(plan_of(gpt_oss), out).resumed == (0, 1, 2)


def test_a_log_that_its_conversion_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had opened it would hold a lock that keeps nobody out."""
    first = open_log(tmp_path, {"layout": "a"})
    lock = fcntl.flock

    def finished(fd: int, how: int) -> None:
        first.close(remove=True)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", finished)
    with pytest.raises(Unavailable, match="has just finished"):
        open_log(tmp_path, {"layout": "a"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("entry", [{"source": "0" * 64}, {"conversion": {"layout": "\u00e9"}}])
def test_a_flipped_bit_in_a_line_of_a_log_is_noticed_wherever_it_is(entry: dict[str, Any]) -> None:
    line = log_line(entry)
    assert log_entry(line, "line 2 of log") == LogEntry(**entry)
    for position in range(8 * (len(line) - 1)):
        flipped = bytearray(line)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match="line 2 of log"):
            log_entry(bytes(flipped), "line 2 of log")


def test_a_log_whose_hash_was_changed_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path, {"layout": "a"})
    log.pin("0" * 64)
    log.close()
    log.path.write_bytes(log.path.read_bytes().replace(b"000", b"010", 1))
    with pytest.raises(CheckpointError, match=r"line 2 of progress\.jsonl is not as it was written"):
        open_log(tmp_path, {"layout": "a"})
