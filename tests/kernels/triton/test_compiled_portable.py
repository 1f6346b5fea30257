"""The portable kernels compiled for GPUs that are not here: every format, and mma.sync on Hopper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devtools.inspection.kernel_report import KernelReport
from devtools.inspection.offline_gpu import OFFLINE_GPUS
from devtools.inspection.shipped_kernels import inspect

from moectl.kernels.choice.launch import Launch
from moectl.problem.moe_problem import SILU
from moectl.problem.schemes import FULL, MXFP4, WeightFormat, int_format
from support.kernel_cases import LAUNCHES
from support.kernel_grid import CHOICES, FORMATS, Case
from support.random_layers import layer_among_others

SOME = [
    (int_format(4, 32, zero_point=True), ("fp16", "BF16")),
    (int_format(8, 128), ("bf16", "BF16")),
    (int_format(8, FULL, zero_point=True), ("fp16", "F16")),
    (MXFP4, ("fp16", "F16")),
]
ALL = [(weight, floats) for weight in FORMATS for floats in CHOICES["floats"]]
NO_WGMMA = LAUNCHES["grouped 32x64x128 mma.sync"]


def products(weight: WeightFormat, floats: tuple[str, str], launch: Launch, arch: int) -> list[KernelReport]:
    """The kernels with matrix instructions of a layer's call, without faults."""
    problem = Case(
        weight, floats, SILU, (256, 128), (8, 2), True, False, "concatenated", 4, "uniform", 0
    ).problem
    _, prepared = layer_among_others(problem, "cpu")
    weights = {role: t.to("meta") for role, t in prepared.weights.items()}
    prepared = replace(prepared, weights=weights, derived={})
    kernels = [it for it in inspect(prepared, 4, launch, OFFLINE_GPUS[arch]) if it.wgmma or it.mma]
    assert len(kernels) == 2 and not any(it.faults for it in kernels), kernels
    return kernels


@pytest.mark.parametrize(("weight", "floats"), SOME, ids=str)
def test_formats_compile_for_sm80(weight: WeightFormat, floats: tuple[str, str]) -> None:
    assert all(it.mma for it in products(weight, floats, LAUNCHES["grouped 16x64x64"], 80))


@pytest.mark.parametrize(("weight", "floats"), SOME[1:2], ids=str)
def test_two_warps_multiply_by_mma_sync_on_sm90(weight: WeightFormat, floats: tuple[str, str]) -> None:
    """So that a Hopper GPU can run what older ones do."""
    assert all(it.mma and not it.wgmma for it in products(weight, floats, NO_WGMMA, 90))
    assert all(it.wgmma for it in products(weight, floats, LAUNCHES["grouped 16x64x64"], 90))


@pytest.mark.slow
@pytest.mark.parametrize("arch", OFFLINE_GPUS)
@pytest.mark.parametrize(("weight", "floats"), ALL, ids=str)
def test_every_format_compiles(weight: WeightFormat, floats: tuple[str, str], arch: int) -> None:
    products(weight, floats, LAUNCHES["grouped 16x64x64"], arch)
