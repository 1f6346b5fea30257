"""What the scripts about kernels refuse, in a sentence and with the exit status of its kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


def ended(script: str, *options: str) -> tuple[int, str]:
    """Exit status and last line of the errors."""
    words = [sys.executable, str(SCRIPTS / script), *options]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("tune_kernels", ("--models", "gpt-5"), "no model is called 'gpt-5'; there are gpt-oss-120b"),
        ("tune_kernels", ("--families", "mid,large"), "no family is called 'large'; there are decode"),
        ("tune_kernels", ("--shard", "3/3"), "it takes I/N, I from 0 to N - 1, got '3/3'"),
        ("sanitize_kernels", ("--formats", "int3"), "no format is called 'int3'; there are mxfp4"),
        ("sanitize_kernels", ("--families", "large"), "no family is called 'large'; there are decode"),
        ("profile_kernels", ("--routing", "skewed"), "it takes uniform, zipf:A or experts:N, got 'skewed'"),
        ("inspect_kernels", ("--family", "large"), "no kernels are called 'large'; choose from decode"),
        ("inspect_kernels", ("--arch", "70"), "no GPU stands for sm_70; choose from 80"),
    ],
)
def test_wrong_usage(script: str, options: tuple[str, ...], said: str) -> None:
    status, line = ended(script, *options)
    assert status == 2 and said in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["bench_peers", "profile_kernels", "sanitize_kernels", "tune_kernels"])
def test_without_a_gpu(script: str) -> None:
    assert ended(script) == (3, f"{script}: it needs a CUDA GPU, and torch sees none")
