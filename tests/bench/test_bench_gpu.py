"""The bench on a GPU: graphs, copies of the weights, clocks and costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_layers import RATES, settings_of
from kernels.layers import GPT_OSS

from moectl.bench.measure import Bench, gpu_name
from moectl.bench.targets import Target
from moectl.problem import Dims
from moectl.random_layer import RandomLayer
from moectl.run import this_machine

pytestmark = pytest.mark.gpu


def test_backends_are_timed_cold_in_graphs_and_in_calls() -> None:
    problem = replace(GPT_OSS, dims=Dims(512, 256), experts=8, local_experts=8)
    machine = this_machine("cuda")
    target = Target("tiny", "-", "1", RandomLayer(problem, machine.torch).experts)
    settings = settings_of(backends=("triton", "torch"), warm=False, tokens=(1, 70))
    rows = {(r.backend, r.tokens): r for r in Bench(settings, machine, (target,), RATES).measured()}
    assert len(rows) == 4 and all(row.timed for row in rows.values()), rows
    assert rows["triton", 1].method == "CUDA graph of 16 calls"
    assert rows["triton", 70].method == "CUDA graph of 4 calls"
    assert rows["torch", 1].method == "calls between events"
    assert "on 16 copies of the weights" in rows["triton", 1].caches
    costs = rows["triton", 1].costs
    assert rows["triton", 1].tactic and costs.peak_bytes > costs.weight_bytes
    assert costs.held_bytes >= costs.weight_bytes
    assert gpu_name(machine.torch).startswith(("GPU-", "MIG-"))


def test_warm_calls_are_faster_than_cold_ones() -> None:
    """A layer that fits the cache, read from it or from memory."""
    problem = replace(GPT_OSS, dims=Dims(2880, 1440), experts=4, local_experts=4)
    machine = this_machine("cuda")
    target = Target("tiny", "-", "1", RandomLayer(problem, machine.torch).experts)
    assert target.nbytes < torch.cuda.get_device_properties(0).L2_cache_size
    us = {}
    for warm in (True, False):
        settings = settings_of(backends=("triton",), warm=warm, tokens=(1,), rounds=11)
        (row,) = Bench(settings, machine, (target,), RATES).measured()
        us[warm] = row.median_us
    assert us[True] < us[False]
