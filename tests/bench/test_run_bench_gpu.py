"""The bench on a GPU: graphs, copies of the weights, clocks and costs."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby

import pytest
import torch

from moectl.bench.bench_targets import BenchTarget
from moectl.bench.run_bench import Bench, gpu_uuid
from moectl.kernels.timing import cold_calls, interleaved
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import Dims
from moectl.run import this_machine
from support.bench_rows import RATES, settings_of
from support.random_layers import GPT_OSS

pytestmark = pytest.mark.gpu


def test_backends_are_timed_cold_in_graphs_and_in_calls() -> None:
    problem = replace(GPT_OSS, dims=Dims(512, 256), experts=8, local_experts=8)
    machine = this_machine("cuda")
    target = BenchTarget("tiny", "-", "1", RandomLayer(problem, machine.torch).experts)
    settings = settings_of(backends=("moectl", "torch"), warm=False, tokens=(1, 70))
    rows = {(r.backend, r.tokens): r for r in Bench(settings, machine, (target,), RATES).measured()}
    assert len(rows) == 4 and all(row.timed for row in rows.values()), rows
    assert rows["moectl", 1].method == "CUDA graph of 16 calls"
    assert rows["moectl", 70].method == "CUDA graph of 4 calls"
    assert rows["torch", 1].method == "calls between events"
    assert "on 16 copies of the weights" in rows["moectl", 1].caches
    costs = rows["moectl", 1].costs
    assert rows["moectl", 1].tactic and costs.peak_bytes > costs.weight_bytes
    assert costs.held_bytes >= costs.weight_bytes
    assert gpu_uuid(machine.torch).startswith(("GPU-", "MIG-"))


def test_warm_calls_are_faster_than_cold_ones() -> None:
    """A layer that fits the cache, read from it or from memory."""
    problem = replace(GPT_OSS, dims=Dims(2880, 1440), experts=4, local_experts=4)
    machine = this_machine("cuda")
    target = BenchTarget("tiny", "-", "1", RandomLayer(problem, machine.torch).experts)
    assert target.nbytes < torch.cuda.get_device_properties(0).L2_cache_size
    us = {}
    for warm in (True, False):
        settings = settings_of(backends=("moectl",), warm=warm, tokens=(1,), rounds=11)
        (row,) = Bench(settings, machine, (target,), RATES).measured()
        us[warm] = row.median_us
    assert us[True] < us[False]


def test_each_is_timed_on_the_clocks_that_it_gets_by_itself() -> None:
    """Untimed runs come first, and what is timed comes together, in as many parts for everyone."""
    ran: list[tuple[str, float]] = []

    def turn(name: str) -> interleaved.TimedCalls:
        x = torch.zeros(1, device="cuda")

        def run() -> None:
            x.add_(1)
            ran.append((name, time.monotonic()))

        return interleaved.TimedCalls(run, 1, "calls", [x], 1e-4)

    made = {name: turn(name) for name in ("a", "b", "c")}
    assert not interleaved.time_interleaved(made, torch.device("cuda"), 11, cold=True)
    assert [len(one.seconds) for one in made.values()] == [11, 11, 11]
    visits = [list(group) for _, group in groupby(ran, key=lambda item: item[0])]
    assert len(visits) == 3 * interleaved.VISITS
    assert all(visit[-4][1] - visit[0][1] >= 0.8 * cold_calls.LEAD_SECONDS for visit in visits)
