"""Two GPUs that share a layer's experts through NCCL, in calls and in CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from support.gpu_rank_cases import CASES, LAYERS, run_rank

RANKS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS,
        reason=f"needs {RANKS} CUDA GPUs, torch.cuda.device_count() is {torch.cuda.device_count()}",
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, (RANKS, str(folder)), nprocs=RANKS)
    return [_said(folder, rank) for rank in range(RANKS)]


def _said(folder: Path, rank: int) -> dict[str, str]:
    said: dict[str, str] = json.loads((folder / f"rank{rank}.json").read_text())
    return said


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LAYERS)
def test_two_gpus_compute_what_one_does(found: list[dict[str, str]], name: str, case: str) -> None:
    assert [said[f"{name}, {case}"] for said in found] == ["", ""]
