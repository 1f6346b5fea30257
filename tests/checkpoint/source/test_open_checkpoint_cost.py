"""What explaining a model of a trillion parameters from its headers costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.sampling import every_nth

SECONDS = 3.0
"""Most processor time of the whole program, start included: 2 where nothing else runs, and half as much
again where other tests share the core."""

MEGABYTES = 300
TRIES = 3
"""Other programs on the machine make a run dearer, never cheaper: the cheapest counts."""


RUN = """
import sys
from moectl.__main__ import main
try:
    main()
finally:
    import re, time
    # This program's own peak: what the system reports of a child counts its parent's memory.
    status = open("/proc/self/status").read()
    print(time.process_time(), re.search(r"VmHWM:\\s*(\\d+) kB", status)[1], file=sys.stderr)
"""


def cost(*arguments: object) -> tuple[float, float, dict[str, Any]]:
    """Processor seconds, peak megabytes and the JSON document of one run of moectl."""
    words = [sys.executable, "-c", RUN, *map(str, arguments), "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, kilobytes = done.stderr.splitlines()[-1].split()
    return float(seconds), int(kilobytes) / 1000, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("model", "tensors"),
    every_nth([("deepseek-ai/DeepSeek-V3", 89_552), ("moonshotai/Kimi-K2-Thinking", 207_660)], 2),
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
    assert runs[0][2]["checkpoints"][0]["source"] == "folder"
