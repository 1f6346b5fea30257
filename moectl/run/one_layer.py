"""One layer on one backend: opened, prepared, run, and held to the reference."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError
from ..kernels.modular.fused_moe_kernel import FusedMoEKernel, kernel_of
from ..kernels.prepared_layer import PreparedMoE
from ..kernels.timing.cold_calls import time_calls
from ..kernels.tolerance import CheckResult, check, tolerance_for
from ..layer.experts import ExpertLayer
from .backend_failures import guarded
from .result_difference import ResultDifference, difference
from .run_machine import RunMachine
from .workload import Workload, expected_of, workload_of


@dataclass(frozen=True)
class RunResult:
    """One layer's output on one backend, held to the reference.

    Attributes:
        layout: of the weights that ran; `relaid` as in `PreparedMoE`.
        y: ``[tokens, hidden]`` on the CPU.
        check: the verdict over all tokens, and `difference` what it differs by.
        prepare_seconds: reading the weights and laying them out.
        first_seconds: the first call, compilation included.
        median_us: median of repeated calls, warm; 0 without tokens.
        weight_bytes: the layer's weights as the backend holds them.
        peak_bytes: device memory at its highest on CUDA; the process' on a CPU.
    """

    backend: str
    layout: str
    relaid: str
    workload: Workload
    y: Tensor
    check: CheckResult
    difference: ResultDifference
    prepare_seconds: float
    first_seconds: float
    median_us: float
    weight_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class CheckedLayer:
    """A layer as one backend has it ready to run.

    Attributes:
        seconds: reading the weights and laying them out.
    """

    layer: ExpertLayer
    prepared: PreparedMoE
    kernel: FusedMoEKernel
    seconds: float


def hold(layer: ExpertLayer, backend: str, machine: RunMachine) -> CheckedLayer:
    """`layer` prepared for `backend`; errors as of `ExpertLayer.prepared`, and BackendFailed."""
    begin = time.perf_counter()
    if machine.torch.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with guarded(backend, layer.layer):
        prepared = layer.prepared(backend, machine.torch)
        kernel = kernel_of(prepared)
        _wait(machine.torch)
    return CheckedLayer(layer, prepared, kernel, time.perf_counter() - begin)


def measure(
    held: CheckedLayer, workload: Workload, expected: Tensor, machine: RunMachine, repeats: int
) -> RunResult:
    """What a held layer makes of `workload`, against `expected`.

    Raises BackendFailed when it breaks, UsageError when ids are given and it routes by itself.
    """
    kernel, prepared, layer = held.kernel, held.prepared, held.layer
    if kernel.monolithic and workload.routed_by == "input":
        raise UsageError(
            f"the {prepared.backend} backend routes by itself, and the input gives ids and weights",
            hint="leave them out of the file, or choose a modular backend",
        )
    inputs, bias = workload.at(prepared)
    with guarded(prepared.backend, layer.layer):
        begin = time.perf_counter()
        y = kernel.run(inputs, bias).cpu()
        first = time.perf_counter() - begin
        median = 0.0
        if workload.tokens:
            median = time_calls(
                [lambda: kernel.run(inputs, bias)],
                machine.torch,
                repeats=repeats,
                cold=False,
                capturable=kernel.capturable,
            ).median_us
    return RunResult(
        prepared.backend,
        prepared.layout,
        prepared.relaid,
        workload,
        y,
        check(y, expected, tolerance_for(layer.problem, kernel.runner.accumulation)),
        difference(y, expected),
        held.seconds,
        first,
        median,
        prepared.nbytes,
        _peak_memory(machine.torch),
    )


def run_layer(
    layer: ExpertLayer,
    backend: str,
    machine: RunMachine,
    *,
    tokens: int = 8,
    seed: int = 0,
    source: Path | None = None,
    repeats: int = 5,
) -> RunResult:
    """Runs `layer` on `backend` and compares with the reference on the stored weights.

    The arguments are those of `workload_of`. Raises as it, as `hold` and as `measure`.
    """
    workload = workload_of(layer, tokens, seed, source)
    expected = expected_of(layer, workload.inputs, machine.torch)
    return measure(hold(layer, backend, machine), workload, expected, machine, repeats)


def _wait(device: torch.device) -> None:
    """Until `device` has done what it was told: what fails there then fails here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
