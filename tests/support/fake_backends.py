"""Backends for tests of `moectl.run`: right ones and wrong ones, registered for the time of a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moectl.environment import Packages, detect_cpu
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.reference import route
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import Runner
from moectl.oracle import registry
from moectl.oracle.backend import Backend
from moectl.oracle.engines.moectl.own import TORCH
from moectl.run import POLICY, RunMachine
from support.runners import register_runner

CPU = RunMachine(torch.device("cpu"), detect_cpu(), Packages())

Compute = Callable[[PreparedMoE, Tensor, Tensor, Tensor], Tensor]


def right(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What plain torch computes."""
    compute = runner_for("torch").compute
    assert compute is not None
    return compute(prepared, x, ids, weights)


def routing(prepared: PreparedMoE, x: Tensor, logits: Tensor, correction_bias: Tensor | None) -> Tensor:
    """The same from router logits."""
    ids, weights = route(logits, prepared.problem, correction_bias)
    return right(prepared, x.contiguous(), prepared.local_ids(ids), weights)


def register(patch: pytest.MonkeyPatch, name: str, compute: Compute | None, **fields: Any) -> Runner:
    """A backend called `name` that computes so, on any device and in any layout unless `fields` say else."""
    base = replace(runner_for("torch"), name=name, compute=compute)
    runner = replace(base, **fields)
    register_runner(patch, runner)
    return runner


def offer(patch: pytest.MonkeyPatch, name: str, compute: Compute | None, **fields: Any) -> None:
    """As `register`, and the tool's policy has it before all others, for every layer and device."""
    register(patch, name, compute, **fields)
    add_record(patch, replace(TORCH, name=name, engine_name=name, runner=name))


def add_record(patch: pytest.MonkeyPatch, backend: Backend) -> None:
    """Puts a record before all others of the tool's policy."""
    engine = registry.ENGINES[POLICY]
    policy = engine.policy
    (route_,) = policy.routes
    (order,) = route_.orders
    wider = replace(
        route_,
        orders=(replace(order, backends=(backend, *order.backends)),),
        names={backend.name: (backend,), **route_.names},
    )
    wider_policy = replace(policy, routes=(wider,))
    patch.setitem(registry.ENGINES, POLICY, replace(engine, policy=wider_policy))
