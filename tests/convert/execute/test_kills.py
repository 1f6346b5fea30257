"""Killed between the first write and the last, then resumed: the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.sampling import every_nth
from support.stream_checkpoints import folder_bytes, gpt_oss_checkpoint

from ..conftest import ROOT

KILLS = ROOT / "tests" / "convert" / "kills.py"


@pytest.mark.parametrize(("threads", "kills"), every_nth([(8, 12), (1, 20), (8, 20)], 3))
def test_kills_at_random_writes(tmp_path: Path, threads: int, kills: int) -> None:
    source = gpt_oss_checkpoint(tmp_path / "source", num_hidden_layers=4, num_local_experts=8)
    before = folder_bytes(source)
    (tmp_path / "work").mkdir()
    options = {
        "source": str(source),
        "work": str(tmp_path / "work"),
        "target": "marlin",
        "max_memory": 26 << 20,
        "threads": threads,
        "points": kills,
        "seed": threads,
    }
    done = subprocess.run(
        [sys.executable, str(KILLS), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["wrong"] == [], (outcome, done.stderr)
    assert outcome["writes"] > 40
    assert outcome["partial"] >= kills * 3 // 4
    assert outcome["layers"] > 0
    assert folder_bytes(source) == before
