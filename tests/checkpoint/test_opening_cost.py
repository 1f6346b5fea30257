"""What explaining a model of a trillion parameters from its headers costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SECONDS = 2.0
"""Most processor time of the whole program, start included."""

MEGABYTES = 300
TRIES = 3
"""Other programs on the machine make a run dearer, never cheaper: the cheapest counts."""


def cost(*arguments: object) -> tuple[float, float, dict[str, object]]:
    """Processor seconds, peak megabytes and the JSON document of one run of moectl."""
    words = [sys.executable, "-m", "moectl", *map(str, arguments), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        document = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, document


@pytest.mark.parametrize(
    ("model", "tensors"), [("moonshotai/Kimi-K2-Thinking", 207_660), ("deepseek-ai/DeepSeek-V3", 89_552)]
)
def test_explaining_a_large_model_from_its_headers(
    model: str, tensors: int, sparse_model: Callable[..., Path]
) -> None:
    folder = sparse_model(model)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) >= tensors
    runs = [cost("explain", folder, "--gpu", "h200") for _ in range(TRIES)]
    seconds, megabytes = min(run[0] for run in runs), max(run[1] for run in runs)
    print(f"{model}: {seconds:.2f} s, {megabytes:.0f} MB, {len(index['weight_map'])} tensors")
    assert seconds < SECONDS
    assert megabytes < MEGABYTES
    assert runs[0][2]["checkpoint"]["source"] == "folder"  # type: ignore[index]
