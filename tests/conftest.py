"""Options and checkpoints that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes or gigabytes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless asked for, and GPU tests where there is no GPU, each with its reason."""
    reasons = {}
    if not config.getoption("--slow"):
        reasons["slow"] = "takes minutes or gigabytes; run with --slow"
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            reasons["gpu"] = "needs a CUDA GPU, torch.cuda.is_available() is False"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss checkpoint in two files: layers 0 and 1, 8 experts, top-4, hidden 256, intermediate 192."""
    from moectl.synth import synthesize

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-gpt-oss"
    return synthesize(
        "openai/gpt-oss-20b",
        folder,
        layers=2,
        experts=8,
        hidden=256,
        intermediate=192,
        shard_bytes=800_000,
    )


@pytest.fixture(scope="session")
def tiny_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-K2-Thinking checkpoint in three files: layers 1 and 2, 8 experts, top-4, 256 x 128."""
    from moectl.synth import synthesize

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-kimi"
    return synthesize(
        "moonshotai/Kimi-K2-Thinking",
        folder,
        layers=2,
        experts=8,
        hidden=256,
        intermediate=128,
        top_k=4,
        shard_bytes=700_000,
    )
