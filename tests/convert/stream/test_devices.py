"""Where batches are converted changes no byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moectl.convert.execute.convert import convert
from moectl.convert.rank_slice import shard_of
from moectl.convert.restore.verify import verify
from moectl.convert.stream.devices import BufferExtent, HostMemory, device_named
from moectl.errors import Unavailable, UsageError
from support.stream_checkpoints import CHECKPOINTS, folder_bytes

from ..conftest import plan_of
from ..restore.test_round_trip import TARGETS


@pytest.mark.parametrize("name", ["", "gpu", "cuda:x", "cuda:-1", "cpu:0", "auto:1", "CUDA "])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="must be cpu, cuda, cuda:N or auto"):
        device_named(name)


def test_a_gpu_that_is_not_there_is_said(gpt_oss: Path, tmp_path: Path) -> None:
    number = torch.cuda.device_count()
    with pytest.raises(Unavailable, match=f"no GPU for --device cuda:{number}"):
        convert(plan_of(gpt_oss), tmp_path / "out", device=f"cuda:{number}")
    assert not (tmp_path / "out").exists()


def test_the_host_is_what_auto_falls_back_to() -> None:
    assert isinstance(device_named("cpu"), HostMemory)
    assert isinstance(device_named("auto"), HostMemory) != torch.cuda.is_available()


def test_the_hosts_buffers_are_those_of_the_slot() -> None:
    slot = HostMemory().slot(3, 2, 1)
    pieces, ready = HostMemory().run(slot, BufferExtent(3, 1), lambda *buffers: list(map(len, buffers)))  # type: ignore[arg-type]
    ready()
    assert pieces == [3, 2, 1]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "target"), TARGETS)
def test_a_gpu_writes_the_same_bytes(kind: str, target: str, tmp_path: Path) -> None:
    source = CHECKPOINTS[kind](tmp_path / "source")
    for memory in (1 << 30, 30 << 20):
        plan = plan_of(source, target, max_memory=memory)
        convert(plan, tmp_path / f"cpu{memory}")
        convert(plan, tmp_path / f"cuda{memory}", device="cuda")
        assert folder_bytes(tmp_path / f"cuda{memory}") == folder_bytes(tmp_path / f"cpu{memory}")
    assert verify(tmp_path / f"cuda{memory}", source).ok


@pytest.mark.gpu
def test_slices_are_cut_on_a_gpu(gpt_oss: Path, tmp_path: Path) -> None:
    for rank in range(2):
        plan = plan_of(gpt_oss, shard=shard_of(rank, 2))
        convert(plan, tmp_path / f"cpu{rank}")
        convert(plan, tmp_path / f"cuda{rank}", device="cuda", threads=1)
        assert folder_bytes(tmp_path / f"cuda{rank}") == folder_bytes(tmp_path / f"cpu{rank}")
