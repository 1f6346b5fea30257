"""The memory of a conversion is bounded, whatever the size of a layer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.sampling import every_nth
from support.stream_checkpoints import gpt_oss_checkpoint

from ..conftest import Drive

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


@pytest.mark.slow
def test_more_memory_is_used_and_seen(large_layer: Path, tmp_path: Path, drive_alone: Drive) -> None:
    """The measure of the tests above sees what a larger batch holds."""
    code, outcome = drive_alone(
        source=large_layer, out=tmp_path / "free", target="marlin", max_memory=1 << 30
    )
    assert code == 0
    assert outcome["above"] > BOUND
    shutil.rmtree(tmp_path / "free")
