"""Runs one layer on one backend and checks the result against the reference."""

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
from .static_scales import beyond_static_scales, quantizes_activations
from .workload import Workload, expected_of, workload_of


@dataclass(frozen=True)
class RunResult:
    """One layer's output on one backend, checked against the reference.

    Attributes:
        layout: layout of the prepared weights.
        relaid: as in `PreparedMoE`.
        y: ``[tokens, hidden]`` on the CPU.
        check: the verdict over all tokens.
        difference: how far `y` is from the reference.
        prepare_seconds: time of reading and repacking the weights.
        first_seconds: time of the first call; on a GPU with the loading or compilation of its kernels.
        median_us, fastest_us: median and shortest time of repeated calls, warm; 0 without tokens.
        weight_bytes: size of the prepared weights.
        peak_bytes: peak device memory on CUDA; the process's peak memory on a CPU.
        beyond: of a result that is out of the tolerance, why the checkpoint's static activation scales cannot
            hold these inputs; empty when they can, or the backend does not use them.
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
    fastest_us: float
    weight_bytes: int
    peak_bytes: int
    beyond: str = ""


@dataclass(frozen=True)
class RunnableLayer:
    """A layer prepared for one backend and ready to run.

    Attributes:
        seconds: time of reading and repacking the weights.
    """

    layer: ExpertLayer
    prepared: PreparedMoE
    kernel: FusedMoEKernel
    seconds: float


def prepare_layer(layer: ExpertLayer, backend: str, machine: RunMachine) -> RunnableLayer:
    """Prepares `layer` for `backend`; raises what `ExpertLayer.prepared` raises, and BackendFailed."""
    begin = time.perf_counter()
    if machine.torch.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with guarded(backend, layer.layer):
        prepared = layer.prepared(backend, machine.torch)
        kernel = kernel_of(prepared)
        _wait(machine.torch)
    return RunnableLayer(layer, prepared, kernel, time.perf_counter() - begin)


def measure(
    ready: RunnableLayer, workload: Workload, expected: Tensor, machine: RunMachine, repeats: int
) -> RunResult:
    """Runs a prepared layer on `workload` and compares the result with `expected` (`expected_of`).

    Raises BackendFailed if it fails, UsageError if the input has ids but the kernel routes by itself.
    """
    kernel, prepared, layer = ready.kernel, ready.prepared, ready.layer
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
        median = fastest = 0.0
        if workload.tokens:
            timing = time_calls(
                [lambda: kernel.run(inputs, bias)],
                machine.torch,
                repeats=repeats,
                cold=False,
                capturable=kernel.capturable,
            )
            median, fastest = timing.median_us, timing.fastest_us
    accumulation = kernel.runner.accumulation_of(layer.problem)
    verdict = check(y, expected, tolerance_for(layer.problem, accumulation))
    quantized = not verdict.ok and quantizes_activations(accumulation)
    return RunResult(
        prepared.backend,
        prepared.layout,
        prepared.relaid,
        workload,
        y,
        verdict,
        difference(y, expected),
        ready.seconds,
        first,
        median,
        fastest,
        prepared.nbytes,
        _peak_memory(machine.torch),
        beyond_static_scales(layer, workload.inputs, machine.torch) if quantized else "",
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
    """Runs `layer` on `backend` and compares the result with the reference on the stored weights.

    `tokens`, `seed` and `source` are those of `workload_of`; `repeats` is the number of timed calls. Raises
    what `workload_of`, `prepare_layer` and `measure` raise.
    """
    workload = workload_of(layer, tokens, seed, source)
    expected = expected_of(layer, workload.inputs, machine.torch)
    return measure(prepare_layer(layer, backend, machine), workload, expected, machine, repeats)


def _wait(device: torch.device) -> None:
    """Synchronizes with `device`, so that its errors are raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
