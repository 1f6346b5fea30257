"""Layers, backends and rows for the tests of the bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moectl.bench.bench_targets import BenchTarget
from moectl.bench.run_bench import Bench
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import Runner
from moectl.layer.experts import ExpertLayer
from moectl.run import BackendChoice, this_machine
from support.bench_rows import RATES, settings_of
from support.random_layers import GPT_OSS, random_layer
from support.runners import register_runner


@pytest.fixture
def bench_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """What makes a bench of a random layer on backends that need not be in the policy."""

    def made(
        names: Sequence[str] = ("torch",),
        layer: ExpertLayer | None = None,
        says: Callable[[str], None] = lambda text: None,
        **changes: Any,
    ) -> Bench:
        monkeypatch.setattr("moectl.bench.run_bench.choose_backends", lambda *_: BackendChoice(tuple(names)))
        target = BenchTarget("tiny", "-", "1", layer or random_layer(GPT_OSS))
        return Bench(settings_of(**changes), this_machine("cpu"), (target,), RATES, says)

    return made


@pytest.fixture
def add_runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runner]:
    """What registers a variant of the torch backend under another name."""

    def add(name: str, **changes: Any) -> Runner:
        runner = replace(runner_for("torch"), name=name, **changes)
        register_runner(monkeypatch, runner)
        return runner

    return add
