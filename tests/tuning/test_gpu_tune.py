"""Tuning on a GPU: real kernels of a small layer, kept, taken by the runner, and those for vLLM's files."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from moectl.cache.launches_file import rows_of
from moectl.kernels.choice.launch import Launch
from moectl.kernels.registry import runner_for
from moectl.kernels.triton.triton_runner import choose, gpu_of
from moectl.layer.random_layer import RandomLayer, routings, tokens_of
from moectl.problem.moe_problem import Dims
from moectl.problem.published_layers import MODELS
from moectl.tuning.engine_bench import EngineBench
from moectl.tuning.engine_tuned_files import files_of, tunable_engines
from moectl.tuning.grouped_gemm import GemmConfig
from moectl.tuning.launch_search import SearchPlan
from moectl.tuning.tune import tune_layers
from moectl.tuning.tuned_layers import TunedLayer
from moectl.tuning.tuning_cases import TuningCase
from support.runners import apply

pytestmark = pytest.mark.gpu

SMALL = replace(MODELS["qwen3-30b"], dims=Dims(512, 256), experts=16, local_experts=16, top_k=4)
FAMILIES = ("decode", "grouped", "warpwise")


def test_rows_are_found_kept_taken_and_right() -> None:
    device = torch.device("cuda")
    plan = SearchPlan(600, time.monotonic, repeats=3)
    tuning = tune_layers([TunedLayer("small", SMALL)], [4, 300], FAMILIES, plan)
    assert tuning.found.done and not tuning.refused
    rows, note = rows_of(SMALL, gpu_of(device))
    assert [row.tokens for row in rows] == [4, 300] and not note
    assert all(0 < row.us <= row.before_us and row.error < 1e-2 for row in rows)
    layer = RandomLayer(SMALL, device)
    prepared = layer.experts.prepared("moectl", device)
    for row in rows:
        taken = choose(SMALL, row.tokens, device)
        assert (taken.family, {**row.tile}) == (row.family, vars_of(taken))
        (routed,) = routings(SMALL, row.tokens, "uniform", 1, device)
        x = tokens_of(SMALL, row.tokens, device)
        y = apply(runner_for("moectl"), prepared, x, routed.ids, routed.weights)
        expected = layer.reference(x, routed, [0, row.tokens - 1])
        assert (y[[0, -1]].float() - expected).norm() < 1e-2 * expected.norm()


def vars_of(launch: Launch) -> dict[str, int]:
    return {name: getattr(launch.tile, name) for name in launch.tile.__dataclass_fields__}


@pytest.mark.parametrize(
    "form",
    [kernel for engine in tunable_engines().values() for kernel in files_of(engine).kernels],
    ids=lambda form: form.says,
)
def test_choices_for_tuned_files_are_right(form: object) -> None:
    if form.scaled and torch.cuda.get_device_capability() < (8, 9):  # type: ignore[attr-defined]
        pytest.skip("this GPU multiplies no FP8 numbers")
    bench = EngineBench(torch.device("cuda"), lambda cell: form)  # type: ignore[arg-type, return-value]
    for tokens, blocks in (
        (3, GemmConfig(16, 64, 128, 1, 4, 3)),
        (3, GemmConfig(16, 32, 64, 1, 4, 4)),
        (300, GemmConfig(64, 128, 128, 16, 8, 3)),
        (300, GemmConfig(128, 64, 64, 1, 4, 3)),
    ):
        cell, launch = TuningCase("small", SMALL, tokens), Launch("fused_moe", blocks)
        assert bench.error(cell, launch) < 5e-3 and bench.time(cell, launch, 3) > 0
