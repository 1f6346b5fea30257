"""Bytes of files in tensors: every one in its place, whichever thread read it and however it came there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moectl.convert.stream import file_transfers
from moectl.convert.stream.file_transfers import Transfer, begin, flat, transfer
from moectl.convert.stream.pipeline import run_ahead
from moectl.convert.stream.source_reader import FolderReader
from moectl.errors import CheckpointError

CPU = torch.device("cpu")
SIZES = {"a": 5000, "b": 77, "c": 12_345}

Fill = Callable[[FolderReader, list[Transfer]], None]


def in_place(reader: FolderReader, transfers: list[Transfer]) -> None:
    transfer(reader, transfers, CPU)


def staged(reader: FolderReader, transfers: list[Transfer]) -> None:
    """The way to a GPU, with buffers that are not pinned and copies to the CPU's memory."""
    fds = {item.file: reader.fd(item.file) for item in transfers}
    file_transfers.Filling(CPU, fds, list(file_transfers._pieces(transfers, 100))).finish()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = random.Random(0)
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(generator.randbytes(size))
    return tmp_path


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of some bytes, read by four threads of which none has larger buffers from before."""
    monkeypatch.setattr(file_transfers, "SMALLEST_PIECE", 60)
    monkeypatch.setattr(file_transfers, "BUFFER_BYTES", 100)
    monkeypatch.setattr(file_transfers, "_threads", lambda: 4)
    file_transfers._pool.cache_clear()
    yield
    file_transfers._pool().shutdown()
    file_transfers._pool.cache_clear()


def some_transfers(folder: Path, device: torch.device) -> tuple[list[Transfer], list[tuple[Tensor, bytes]]]:
    """Transfers of random ranges to three targets with gaps, and what each target holds afterwards."""
    generator = random.Random(1)
    transfers, expected = [], []
    for _ in range(3):
        target, holds, at = torch.zeros(9000, dtype=torch.uint8, device=device), bytearray(9000), 0
        while at < 8000:
            file = generator.choice(sorted(SIZES))
            size = generator.randint(0, min(SIZES[file], 9000 - at))
            start = generator.randint(0, SIZES[file] - size)
            transfers.append(Transfer(file, start, size, target, at))
            holds[at : at + size] = (folder / file).read_bytes()[start : start + size]
            at += size + generator.choice((0, 0, 1, 50))
        expected.append((target, bytes(holds)))
    return transfers, expected


@pytest.mark.parametrize("fill", [in_place, staged])
def test_every_byte_arrives_in_its_place(folder: Path, fill: Fill) -> None:
    transfers, expected = some_transfers(folder, CPU)
    with FolderReader(folder) as reader:
        fill(reader, transfers)
    for target, holds in expected:
        assert target.numpy().tobytes() == holds


@pytest.mark.parametrize("fill", [in_place, staged])
def test_targets_made_for_inference_are_filled_too(folder: Path, fill: Fill) -> None:
    with torch.inference_mode(), FolderReader(folder) as reader:
        targets = [torch.zeros(4, 25, dtype=torch.int32), torch.zeros(77, dtype=torch.uint8)]
        fill(reader, [Transfer("c", 7, 400, flat(targets[0])), Transfer("b", 0, 77, flat(targets[1]))])
    assert targets[0].numpy().tobytes() == (folder / "c").read_bytes()[7:407]
    assert targets[1].numpy().tobytes() == (folder / "b").read_bytes()


@pytest.mark.parametrize("fill", [in_place, staged])
def test_a_truncated_file_is_named_with_its_offset(folder: Path, fill: Fill) -> None:
    target = torch.zeros(6000, dtype=torch.uint8)
    with FolderReader(folder) as reader:
        with pytest.raises(CheckpointError, match=r"a is truncated: \d+ bytes expected at offset \d+, got"):
            fill(reader, [Transfer("a", 0, 6000, target), Transfer("b", 0, 77, target)])
        # The threads are ready for the next.
        fill(reader, [Transfer("a", 0, 5000, target)])
    assert target[:5000].numpy().tobytes() == (folder / "a").read_bytes()


def test_neighbours_in_a_target_are_copied_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, other, copies = torch.zeros(90, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8), []
    copy = Tensor.copy_
    monkeypatch.setattr(
        Tensor, "copy_", lambda t, *args, **more: (copies.append(len(t)), copy(t, *args, **more))
    )
    with FolderReader(folder) as reader:
        experts = [Transfer("c", 1000 * i, 30, target, 30 * i) for i in range(3)]
        staged(reader, [*experts, Transfer("b", 0, 9, other)])
    assert copies == [90, 9]


def test_pieces_are_large_and_enough_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_transfers, "BUFFER_BYTES", 1000)
    assert [file_transfers._piece_bytes(total) for total in (1, 480, 800, 7999, 1 << 20)] == [
        60, 60, 100, 1000, 1000,
    ]  # fmt: skip


def test_work_is_done_ahead_in_order_and_no_further() -> None:
    begun: list[int] = []

    def work(job: int) -> int:
        begun.append(job)
        if job == 6:
            raise CheckpointError("six")
        return -job

    results = run_ahead(work, range(9), 3)
    for job in range(6):
        assert next(results) == -job
        assert max(begun) <= job + 2
    with pytest.raises(CheckpointError, match="six"):
        next(results)
    assert max(begun) <= 8 and list(run_ahead(work, [], 3)) == []


@pytest.mark.gpu
def test_a_gpus_tensors_are_filled_in_the_streams_order(folder: Path) -> None:
    device = torch.device("cuda", 0)
    for turn in range(20):
        transfers, expected = some_transfers(folder, device)
        torch.cuda.synchronize()
        with FolderReader(folder) as reader, torch.cuda.stream(torch.cuda.Stream()):
            # Work on the targets that takes longer than the reads: copies have to wait for it.
            torch.cuda._sleep(5_000_000)
            for target, _ in expected:
                target.fill_(turn)
                target.zero_()
            transfer(reader, transfers, device)
            after = [target.clone() for target, _ in expected]
            held = [t.cpu().numpy().tobytes() for t in after]
        assert held == [holds for _, holds in expected]


@pytest.mark.gpu
def test_transfers_under_way_at_once_end_in_any_stream(folder: Path) -> None:
    device = torch.device("cuda", 0)
    for _ in range(20):
        first, second, dropped = (some_transfers(folder, device) for _ in range(3))
        with FolderReader(folder) as reader:
            begun = [begin(reader, transfers, device) for transfers, _ in (first, second, dropped)]
            begun[2].stop()
            for target, _ in dropped[1]:
                target.zero_()
            with torch.cuda.stream(torch.cuda.Stream()):
                for filling, (_, expected) in zip(begun, (first, second), strict=False):
                    filling.finish()
                    copies = [target.clone() for target, _ in expected]
                    assert [t.cpu().numpy().tobytes() for t in copies] == [holds for _, holds in expected]
        assert not any(target.any() for target, _ in dropped[1])


@pytest.mark.gpu
def test_nothing_is_copied_to_a_gpu_any_more_after_an_error(folder: Path) -> None:
    device = torch.device("cuda")
    target = torch.zeros(6000, dtype=torch.uint8, device=device)
    with FolderReader(folder) as reader:
        with pytest.raises(CheckpointError, match="a is truncated"):
            transfer(reader, [Transfer("a", 0, 6000, target)], device)
        target.zero_()
        torch.cuda.synchronize()
        assert not target.any()
        before = torch.cuda.memory_allocated()
        transfer(reader, [Transfer("a", 0, 5000, target)], device)
        assert torch.cuda.memory_allocated() == before
    assert target[:5000].cpu().numpy().tobytes() == (folder / "a").read_bytes()
