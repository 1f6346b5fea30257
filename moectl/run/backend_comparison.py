"""Several backends on the same weights and tokens: each against the reference, and against each other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ..errors import BackendFailed, MoectlError, NoBackend, Unavailable, UsageError
from ..layer.experts import ExpertLayer
from .backend_failures import lost
from .one_layer import CheckedLayer, RunResult, hold, measure
from .result_difference import ResultDifference, difference
from .run_machine import RunMachine
from .stress import CaseResult, PlannedCase, stress
from .workload import Workload, expected_of


@dataclass(frozen=True)
class BackendOutcome:
    """What came of one backend: a result, or the error that it ended with.

    Attributes:
        stress: results of the planned cases; of a backend that broke, those until then.
        refused: it cannot serve the layer, and the `error` says so: nothing has run, and nothing has failed.
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
    """Two backends' results beside each other; distances relative to the reference."""

    one: str
    other: str
    difference: ResultDifference


@dataclass(frozen=True)
class BackendComparison:
    """Backends on one layer. Two that both agree with the reference differ by the sum of both bounds at most,
    so that verdicts are on the reference alone.

    Attributes:
        tried: those that failed or were refused before the one whose outcome this is, where another may
            take over.
    """

    outcomes: tuple[BackendOutcome, ...]
    pairs: tuple[BackendPair, ...] = ()
    tried: tuple[BackendOutcome, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every backend is that can serve the layer."""
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
    """Each of `backends` on `workload` and the stress `cases`, one after the other.

    A backend that fails has its error as outcome, and the others go on; each one's memory is freed
    before the next. Raises CheckpointError when the weights cannot be read.
    """
    expected = expected_of(layer, workload.inputs, machine.torch)
    outcomes: list[BackendOutcome] = []
    for name in backends:
        progress(name)
        outcomes.append(_outcome(layer, name, machine, workload, expected, cases, repeats, progress))
        _free(machine.torch, outcomes[-1].error)
        gone = lost(machine.torch) if outcomes[-1].error or cases else ""
        if gone:
            hint = "run them without it"
            left = backends[len(outcomes) :]
            outcomes += [
                BackendOutcome(it, error=BackendFailed(it, f"not run, {gone}", hint=hint)) for it in left
            ]
            break
    done = [it.result for it in outcomes if it.result is not None]
    pairs = [
        BackendPair(a.backend, b.backend, difference(a.y, b.y, scale=expected))
        for a, b in combinations(done, 2)
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
    """The first of `backends` that does not fail, with those that did in `tried`.

    A result that is wrong is no failure: it is what there is to find. Raises the last one's error when all
    of them fail.
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
        if lost(machine.torch):
            break
        if name != backends[-1]:
            _free(machine.torch, outcome.error)
    assert tried and tried[-1].error is not None
    raise _all_failed(tried)


def _all_failed(tried: Sequence[BackendOutcome]) -> MoectlError:
    """The one error, or one that names them all."""
    last = tried[-1].error
    assert last is not None
    if len(tried) == 1:
        return last
    listed = "; ".join(it.error.what for it in tried if it.error)
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
        held: CheckedLayer = hold(layer, name, machine)
        result = measure(held, workload, expected, machine, repeats)
        found = tuple(stress(held, cases, machine.torch, lambda case: progress(f"{name}: {case}")))
        return BackendOutcome(name, result, stress=found)
    except (BackendFailed, NoBackend, Unavailable, UsageError) as error:
        return BackendOutcome(name, result, error)


def _free(device: torch.device, error: BaseException | None = None) -> None:
    """Give back what the last backend held; where it failed, the frames of its `error` hold it, too."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()
    if device.type == "cuda" and not lost(device):
        torch.cuda.empty_cache()
