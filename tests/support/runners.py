"""Runners for the time of a test, and one call of any runner."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from moectl.kernels import registry
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.registry import RunnerEntry
from moectl.kernels.runner import Runner


def apply(runner: Runner, prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` that `runner` computes of expert ids and weights."""
    return FusedMoEKernel(prepared, runner).apply(x, ids, weights)


def entry_of(runner: Runner, packages: tuple[str, ...] = ("torch",), name: str = "") -> RunnerEntry:
    """An entry of the registry for a runner that lies in no file: in a module that is made for it."""
    module = ModuleType(f"runner_of_a_test_{name or runner.name}")
    module.__dict__["RUNNER"] = runner
    sys.modules[module.__name__] = module
    return RunnerEntry(f"{module.__name__}:RUNNER", packages)


def register_runner(patch: pytest.MonkeyPatch, runner: Runner, name: str = "", **fields: Any) -> None:
    """Puts `runner` into the registry under its name, or `name`, until the test ends."""
    entries: MutableMapping[str, RunnerEntry] = registry.RUNNERS
    patch.setitem(entries, name or runner.name, entry_of(runner, name=name, **fields))
