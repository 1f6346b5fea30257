"""Several backends on the same weights and tokens, compared with the reference and each other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ..errors import BackendFailed, MoectlError, NoBackend, Unavailable, UsageError
from ..layer.experts import ExpertLayer
from .backend_failures import device_failure
from .one_layer import RunResult, measure, prepare_layer
from .result_difference import ResultDifference, difference
from .run_machine import RunMachine
from .stress import CaseResult, PlannedCase, stress
from .workload import Workload, expected_of


@dataclass(frozen=True)
class BackendOutcome:
    """The outcome of one backend: a result, or the error that ended it.

    Attributes:
        stress: results of the planned cases; if the backend broke, those up to then.
        refused: it does not support the layer (see `error`), so nothing ran; this is not a failure.
    """

    backend: str
    result: RunResult | None = None
    error: MoectlError | None = None
    stress: tuple[CaseResult, ...] = ()
    refused: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ran, agrees with the reference, and fails no case."""
        return (
            self.error is None
            and self.result is not None
            and self.result.check.ok
            and not any(case.failed for case in self.stress)
        )


@dataclass(frozen=True, slots=True)
class BackendPair:
    """The difference between the results of two backends; distances are relative to the reference."""

    one: str
    other: str
    difference: ResultDifference


@dataclass(frozen=True)
class BackendComparison:
    """Backends on one layer. Only differences from the reference count for verdicts: two results within their
    tolerances differ by at most the sum of both.

    Attributes:
        tried: with fallback, the backends that failed or were refused before the one that ran.
    """

    outcomes: tuple[BackendOutcome, ...]
    pairs: tuple[BackendPair, ...] = ()
    tried: tuple[BackendOutcome, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every backend that supports the layer is ok."""
        return all(outcome.ok or outcome.refused for outcome in self.outcomes)


def compare_backends(
    layer: ExpertLayer,
    backends: Sequence[str],
    machine: RunMachine,
    workload: Workload,
    *,
    cases: Sequence[PlannedCase] = (),
    repeats: int = 5,
    progress: Callable[[str], None] = lambda text: None,
) -> BackendComparison:
    """Runs each of `backends` on `workload` and the stress `cases`, one after the other.

    The outcome of a backend that fails is its error, and the others still run. Memory is freed between
    backends. Raises CheckpointError if the weights cannot be read.
    """
    expected = expected_of(layer, workload.inputs, machine.torch)
    outcomes: list[BackendOutcome] = []
    for name in backends:
        progress(name)
        outcomes.append(_outcome(layer, name, machine, workload, expected, cases, repeats, progress))
        _free(machine.torch, outcomes[-1].error)
        device_error = device_failure(machine.torch) if outcomes[-1].error or cases else ""
        if device_error:
            hint = f"run it without {name}"
            outcomes += [
                BackendOutcome(other, error=BackendFailed(other, f"not run, {device_error}", hint=hint))
                for other in backends[len(outcomes) :]
            ]
            break
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    pairs = [
        BackendPair(a.backend, b.backend, difference(a.y, b.y, scale=expected))
        for a, b in combinations(results, 2)
    ]
    return BackendComparison(tuple(outcomes), tuple(pairs))


def first_that_runs(
    layer: ExpertLayer,
    backends: Sequence[str],
    machine: RunMachine,
    workload: Workload,
    *,
    cases: Sequence[PlannedCase] = (),
    repeats: int = 5,
    progress: Callable[[str], None] = lambda text: None,
) -> BackendComparison:
    """Runs the first of `backends` that does not fail; the failed ones are in `tried`.

    A wrong result is not a failure in this sense: it is reported. Raises if all of them fail.
    """
    expected = expected_of(layer, workload.inputs, machine.torch)
    tried: list[BackendOutcome] = []
    for name in backends:
        progress(name)
        outcome = _outcome(layer, name, machine, workload, expected, cases, repeats, progress)
        if outcome.error is None:
            _free(machine.torch)
            return BackendComparison((outcome,), tried=tuple(tried))
        tried.append(outcome)
        if device_failure(machine.torch):
            break
        if name != backends[-1]:
            _free(machine.torch, outcome.error)
    assert tried and tried[-1].error is not None
    raise _all_failed(tried)


def _all_failed(tried: Sequence[BackendOutcome]) -> MoectlError:
    """The only error, or one that lists them all."""
    last = tried[-1].error
    assert last is not None
    if len(tried) == 1:
        return last
    listed = "; ".join(outcome.error.what for outcome in tried if outcome.error)
    return NoBackend(f"every backend that was tried failed: {listed}", hint=last.hint)


def _outcome(
    layer: ExpertLayer,
    name: str,
    machine: RunMachine,
    workload: Workload,
    expected: Tensor,
    cases: Sequence[PlannedCase],
    repeats: int,
    progress: Callable[[str], None],
) -> BackendOutcome:
    result: RunResult | None = None
    try:
        ready = prepare_layer(layer, name, machine)
        result = measure(ready, workload, expected, machine, repeats)
        results = tuple(stress(ready, cases, machine.torch, lambda case: progress(f"{name}: {case}")))
        return BackendOutcome(name, result, stress=results)
    except (BackendFailed, NoBackend, Unavailable, UsageError) as error:
        return BackendOutcome(name, result, error)


def _free(device: torch.device, error: BaseException | None = None) -> None:
    """Frees the last backend's memory, including what the frames of its `error` keep alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()
    if device.type == "cuda" and not device_failure(device):
        torch.cuda.empty_cache()
