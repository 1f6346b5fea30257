"""What the default engine would choose, as the backend that has the same kernels here."""

from __future__ import annotations

import pytest

from moectl.bench.engine_pick import picked
from moectl.checkpoint import open_checkpoint
from moectl.environment import find_device

PICKS = [
    ("openai/gpt-oss-20b", "h200", "triton_kernels"),  # called triton there, as its experts for BF16 are
    ("Qwen/Qwen3-30B-A3B", "h200", "triton"),
    ("deepseek-ai/DeepSeek-V3", "h200", "triton"),
    ("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "h200", "cutlass"),
    ("moonshotai/Kimi-K2-Thinking", "h200", "humming"),
    ("moonshotai/Kimi-K2-Thinking", "b200", "marlin"),
]


@pytest.mark.parametrize(("name", "gpu", "backend"), PICKS)
def test_names_that_an_engine_gives_to_several_kernels_are_told_apart(
    name: str, gpu: str, backend: str
) -> None:
    pick = picked(open_checkpoint(name, offline=True).groups[0].problem, find_device(gpu))
    assert pick is not None and pick.backend == backend
