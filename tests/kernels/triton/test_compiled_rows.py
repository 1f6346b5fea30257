"""Kernels of layers in rows, compiled for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch
from devtools.inspection.kernel_report import KernelReport
from devtools.inspection.offline_gpu import OFFLINE_GPUS, OfflineGpu, compiling_for
from devtools.inspection.shipped_kernels import inspect

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_model import FITTED_CAPABILITY
from moectl.kernels.choice.launch_plan import launch_for
from moectl.kernels.triton.triton_runner import choose_shipped
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import SILU, Dims, MoEProblem
from support.row_cases import SCHEMES


def portable_launch(problem: MoEProblem, tokens: int, gpu: OfflineGpu) -> Launch:
    """The portable kernels' launch on a GPU, where on SM90 other kernels would be chosen."""
    if gpu.capability == FITTED_CAPABILITY:
        return launch_for(problem, tokens)
    with compiling_for(gpu):
        return choose_shipped(problem, tokens, torch.device("cuda"))


def products(scheme: str, tokens: int, arch: int) -> list[KernelReport]:
    """The GEMM kernels of a call of Qwen3-30B's layer; all kernels of it fit, and none spills."""
    problem, gpu = MoEProblem(Dims(2048, 768), 128, 8, SCHEMES[scheme], SILU), OFFLINE_GPUS[arch]
    launch = portable_launch(problem, tokens, gpu)
    kernels = inspect(empty_layer(problem, "moectl"), tokens, launch, gpu)
    # At the end of one kernel ptxas spills 24 bytes, for a second program on a multiprocessor of SM80 or 86.
    allowed = 24 if arch in (80, 86) and scheme.endswith("16-bit tokens") else 0
    assert all(it.stack <= allowed for it in kernels if any("spill" in f for f in it.faults)), kernels
    assert all(it.shared <= gpu.shared for it in kernels), kernels
    found = [it for it in kernels if "gemm" in it.name]
    assert len(found) == 2
    return found


def multiplies(it: KernelReport, instruction: str) -> bool:
    return it.opcodes[instruction] > 0


@pytest.mark.parametrize(
    ("scheme", "tokens", "instruction"),
    [("plain", 64, "HGMMA"), ("block", 1, "QGMMA"), ("tensor, 16-bit tokens", 64, "HGMMA")],
)
def test_on_sm90_by_wgmma(scheme: str, tokens: int, instruction: str) -> None:
    assert all(multiplies(it, instruction) for it in products(scheme, tokens, 90))


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 86, 89])
def test_fp8_codes_are_multiplied_as_fp16_where_there_are_no_fp8_units(arch: int) -> None:
    fp8 = [it for it in products("block", 1, arch) if multiplies(it, "QMMA")]
    assert len(fp8) == (2 if arch == 89 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("arch", OFFLINE_GPUS)
@pytest.mark.parametrize("tokens", [1, 16, 64, 512, 4096])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_compiles(scheme: str, tokens: int, arch: int) -> None:
    products(scheme, tokens, arch)
