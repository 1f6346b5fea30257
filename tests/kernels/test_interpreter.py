"""Runs the kernel cases in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


CASES = [
    "interpreted_batch.py",
    "interpreted_cases.py",
    "interpreted_marlin.py",
    "interpreted_peers.py",
    "interpreted_plain_gemm.py",
    "interpreted_prefill.py",
    "interpreted_router.py",
    "interpreted_routing.py",
    "interpreted_stress.py",
    "interpreted_warpwise.py",
]


@pytest.mark.parametrize("cases", CASES)
def test_kernels_in_the_interpreter(cases: str) -> None:
    root = HERE.parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / cases)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
