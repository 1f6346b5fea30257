"""Runs the layers of a checkpoint one after the other, with the weights of one at a time in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import MoectlError, Unavailable
from ..layer.experts import ExpertLayer
from ..layer.layer_source import LayerSource
from .backend_comparison import BackendComparison, BackendOutcome, compare_backends, first_that_runs
from .layer_variants import in_dtype
from .run_machine import BackendChoice, RunMachine, choose_backends
from .run_plan import RunPlan
from .stress import plan_stress
from .workload import Workload, workload_of


@dataclass(frozen=True)
class LayerRun:
    """The outcome of one layer: its backends compared, or the error that prevented a run.

    Attributes:
        choice: the backends chosen for it, and the decision that they come from.
        model_dtype: the checkpoint's dtype if the layer ran in another one; else empty.
    """

    number: int
    layer: ExpertLayer | None = None
    workload: Workload | None = None
    compared: BackendComparison | None = None
    error: MoectlError | None = None
    choice: BackendChoice | None = None
    model_dtype: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ran, and every backend agrees with the reference."""
        return self.compared is not None and self.compared.ok


def run_one(
    layer: ExpertLayer,
    machine: RunMachine,
    plan: RunPlan,
    progress: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
) -> LayerRun:
    """Runs `layer` according to `plan`; `note` gets a sentence if measured times choose the backend.

    Raises a MoectlError if it cannot be run at all.
    """
    model_dtype = layer.problem.dtype if plan.dtype not in ("", layer.problem.dtype) else ""
    layer = in_dtype(layer, plan.dtype or layer.problem.dtype)
    choice = choose(layer, machine, plan)
    if not plan.backends and not plan.compares and choice.by_measurement:
        note(choice.by_measurement)
    workload = workload_of(layer, plan.tokens, plan.seed, plan.source)
    cases = plan_stress(layer, machine.torch, seed=plan.seed) if plan.stress else ()
    run = compare_backends if plan.compares else first_that_runs
    compared = run(
        layer, choice.names, machine, workload, cases=cases, repeats=plan.repeats, progress=progress
    )
    refused = tuple(BackendOutcome(name, error=error, refused=True) for name, error in choice.refused.items())
    if plan.compares:
        compared = replace(compared, outcomes=_in_order((*refused, *compared.outcomes), plan.backends))
    else:
        compared = replace(compared, tried=(*refused, *compared.tried))
    return LayerRun(layer.layer, layer, workload, compared, choice=choice, model_dtype=model_dtype)


def _in_order(outcomes: Sequence[BackendOutcome], names: Sequence[str]) -> tuple[BackendOutcome, ...]:
    """`outcomes` in the order of `names`; other backends last."""
    ranks = {name: rank for rank, name in enumerate(names)}
    return tuple(sorted(outcomes, key=lambda outcome: ranks.get(outcome.backend, len(ranks))))


def choose(layer: ExpertLayer, machine: RunMachine, plan: RunPlan) -> BackendChoice:
    """The backends to run `layer` on, in order; only the first if `plan` allows no fallback.

    Raises what `choose_backends` raises, and `unsupported_error` if no requested backend supports the layer.
    """
    names = () if plan.every else plan.backends
    choice = choose_backends(layer.problem, machine, names, layer.layout, fallback=plan.fallback).require()
    only_best = not names and not plan.every and not plan.fallback
    return replace(choice, names=choice.names[:1]) if only_best else choice


def every_layer(
    source: LayerSource,
    numbers: Sequence[int],
    machine: RunMachine,
    plan: RunPlan,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[LayerRun]:
    """Yields the `LayerRun` of each layer in `numbers`; that of a layer that cannot run holds the error.

    A layer's weights are freed before the next one is opened.
    """
    for number in numbers:
        try:
            run = run_one(source.layer(number), machine, plan, progress)
        except MoectlError as error:
            run = LayerRun(number, error=error)
        except OSError as error:
            run = LayerRun(number, error=Unavailable(f"layer {number} cannot be read: {error}"))
        yield run
