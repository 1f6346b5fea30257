"""Killed between the first write and the last, then resumed: the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.sampling import every_nth
from support.stream_checkpoints import folder_bytes, gpt_oss_checkpoint

from ..conftest import ROOT

KILLS = ROOT / "tests" / "convert" / "kills.py"


def killed_and_resumed(tmp_path: Path, source: Path, **options: Any) -> dict[str, Any]:
    """What `kills.py` says of `source`, all of whose resumed conversions must have the bytes of the first."""
    before = folder_bytes(source)
    (tmp_path / "work").mkdir()
    told = {"source": str(source), "work": str(tmp_path / "work"), "target": "marlin", **options}
    done = subprocess.run(
        [sys.executable, str(KILLS), json.dumps(told)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    assert outcome["wrong"] == [], (outcome, done.stderr)
    assert outcome["layers"] > 0
    assert folder_bytes(source) == before
    return outcome


@pytest.mark.parametrize(("threads", "kills"), every_nth([(8, 12), (1, 20), (8, 20)], 3))
def test_kills_at_random_writes(tmp_path: Path, threads: int, kills: int) -> None:
    source = gpt_oss_checkpoint(tmp_path / "source", num_hidden_layers=4, num_local_experts=8)
    outcome = killed_and_resumed(
        tmp_path, source, max_memory=26 << 20, threads=threads, points=kills, seed=threads
    )
    assert outcome["writes"] > 40
    assert outcome["partial"] >= kills * 3 // 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", every_nth([((1, 2),), ((2, 1),), ((2, 2),)], 3))
def test_kills_of_ranks_and_at_each_write_of_what_they_share(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """The last writes: rest (a link, two extracted files), small files, configs, index, manifest, READY."""
    source = gpt_oss_checkpoint(tmp_path / "source", num_hidden_layers=2, num_local_experts=2)
    outcome = killed_and_resumed(
        tmp_path, source, max_memory=26 << 20, threads=1, points=6, last=22, seed=3, ranks=ranks
    )
    assert len(outcome["points"]) == 28 and outcome["partial"] == 28
