"""What tuning holds launches to, in Triton's interpreter; run by `test_interpreter` in its own process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.tma_launches import TmaTile
from moectl.kernels.tolerance import check
from moectl.problem.moe_problem import MoEProblem, Parallel
from moectl.tuning.gpu_bench import AGREE, AGREE_IN_TENSOR_CORES, GpuBench, agreement
from moectl.tuning.tuning_cases import TuningCase
from support.kernel_cases import LAUNCHES
from support.random_layers import GPT_OSS, KIMI
from support.sampling import every_nth

LAYERS = {
    "whole": KIMI,
    "one rank of experts": replace(KIMI, experts=18).on(Parallel(tp=6, ep=True)),
    "one rank of slices": replace(GPT_OSS, experts=4).on(Parallel(tp=3)),
}


@pytest.mark.parametrize(("layer", "tokens"), every_nth([*product(LAYERS, (9,)), *product(LAYERS, (1,))], 2))
def test_portable_kernels_are_what_the_reference_says(layer: str, tokens: int) -> None:
    problem: MoEProblem = LAYERS[layer]
    bench, cell = GpuBench(torch.device("cpu")), TuningCase(layer, problem, tokens)
    inputs = bench.inputs(cell)
    assert inputs.expected.any() and all(s.ids.max() < problem.local_experts for s in inputs.sets)
    launch: Launch = LAUNCHES["grouped 16x64x64"]
    assert bench.error(cell, launch) < AGREE.rms
    assert not check(-inputs.expected, inputs.expected, AGREE).ok


def test_sums_in_tensor_cores_may_differ_more() -> None:
    tile = TmaTile(128, 2, 2, 4, fast_sums=1)
    assert agreement(Launch("tma", tile)) == AGREE_IN_TENSOR_CORES
    for other in (Launch("tma", replace(tile, fast_sums=0)), LAUNCHES["grouped 16x64x64"]):
        assert agreement(other) == AGREE
