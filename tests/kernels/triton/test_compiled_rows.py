"""Kernels of layers in rows, compiled for GPUs that are not here."""

from __future__ import annotations

import pytest
from devtools.inspection.kernel_report import KernelReport
from devtools.inspection.offline_gpu import OFFLINE_GPUS
from devtools.inspection.shipped_kernels import inspect

from moectl.kernels.choice.launch_plan import launch_for
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import SILU, Dims, MoEProblem
from support.row_cases import SCHEMES


def products(scheme: str, tokens: int, arch: int) -> list[KernelReport]:
    """The GEMM kernels of a call of Qwen3-30B's layer; no kernel of it spills."""
    problem = MoEProblem(Dims(2048, 768), 128, 8, SCHEMES[scheme], SILU)
    kernels = inspect(empty_layer(problem, "moectl"), tokens, launch_for(problem, tokens), OFFLINE_GPUS[arch])
    # At the end of one kernel ptxas spills 24 bytes, to fit a second program on a multiprocessor of SM80.
    allowed = 24 if arch == 80 and scheme.endswith("16-bit tokens") else 0
    assert all(it.stack <= allowed for it in kernels if any("spill" in f for f in it.faults)), kernels
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


@pytest.mark.parametrize("arch", [80, 89])
def test_fp8_codes_are_multiplied_as_fp16_where_there_are_no_fp8_units(arch: int) -> None:
    fp8 = [it for it in products("block", 1, arch) if multiplies(it, "QMMA")]
    assert len(fp8) == (2 if arch == 89 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("tokens", [1, 16, 64, 512, 4096])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_compiles(scheme: str, tokens: int, arch: int) -> None:
    products(scheme, tokens, arch)
