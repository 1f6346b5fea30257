"""Layers of a whole checkpoint, one after the other, each with a memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint import Checkpoint
from ..convert.manifest import Manifest, load_manifest
from ..errors import MoectlError, NoBackend, Unavailable
from ..experts import ExpertLayer
from ..prepare import checkpoint_layer, converted_layer
from .comparing import Compared, Outcome, compare_backends, first_that_runs
from .machine import Machine, choose_backends, none_serves
from .plan import RunPlan
from .stress import plan_stress
from .variants import in_dtype
from .workload import Workload, workload_of


@dataclass(frozen=True)
class LayerRun:
    """What came of one layer: backends compared, or why it could not be run at all.

    Attributes:
        model_dtype: the dtype that the checkpoint says, where the layer ran in another; else empty.
    """

    number: int
    layer: ExpertLayer | None = None
    workload: Workload | None = None
    compared: Compared | None = None
    error: MoectlError | None = None
    model_dtype: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ran, and every backend agrees with the reference."""
        return self.compared is not None and self.compared.ok


def layer_numbers(source: Checkpoint | Manifest) -> list[int]:
    """Numbers of all MoE layers that `source` holds, rising."""
    if isinstance(source, Checkpoint):
        return sorted(number for group in source.groups for number in group.layers)
    return sorted(source.layers)


def open_source(source: Checkpoint | Path) -> Checkpoint | Manifest:
    """A converted folder's manifest for its path, read once for all layers; a checkpoint as it is."""
    return load_manifest(source) if isinstance(source, Path) else source


def run_one(
    layer: ExpertLayer, machine: Machine, plan: RunPlan, progress: Callable[[str], None] = lambda text: None
) -> LayerRun:
    """`layer` as `plan` says. Raises what it cannot be run for at all."""
    model_dtype = layer.problem.dtype if plan.dtype not in ("", layer.problem.dtype) else ""
    layer = in_dtype(layer, plan.dtype or layer.problem.dtype)
    names, refused = choose(layer, machine, plan)
    workload = workload_of(layer, plan.tokens, plan.seed, plan.source)
    cases = plan_stress(layer, machine.torch, seed=plan.seed) if plan.stress else ()
    run = compare_backends if plan.compares else first_that_runs
    compared = run(layer, names, machine, workload, cases=cases, repeats=plan.repeats, progress=progress)
    if plan.compares:
        compared = replace(compared, outcomes=_as_asked((*refused, *compared.outcomes), plan.backends))
    else:
        compared = replace(compared, tried=(*refused, *compared.tried))
    return LayerRun(layer.layer, layer, workload, compared, model_dtype=model_dtype)


def _as_asked(outcomes: Sequence[Outcome], names: Sequence[str]) -> tuple[Outcome, ...]:
    """In the order of `names`; those of other names last."""
    places = {name: at for at, name in enumerate(names)}
    return tuple(sorted(outcomes, key=lambda it: places.get(it.backend, len(places))))


def choose(layer: ExpertLayer, machine: Machine, plan: RunPlan) -> tuple[list[str], tuple[Outcome, ...]]:
    """The backends that `plan` runs `layer` on, in order; the first alone where no other may take over.

    Those asked for that cannot serve are the second of the pair, with their reasons, where others run.
    Raises as `choose_backends`, and `none_serves` of several.
    """
    problem, stored = layer.problem, layer.layout
    named: list[str] = []
    refused: list[tuple[str, MoectlError]] = []
    for name in () if plan.every else plan.backends:
        try:
            named += choose_backends(problem, machine, [name], stored)
        except (NoBackend, Unavailable) as error:
            refused.append((name, error))
    if refused and not named and not plan.fallback:
        raise none_serves([error for _, error in refused])
    told = tuple(Outcome(name, error=error, refused=True) for name, error in refused)
    if named and not plan.fallback:
        return list(dict.fromkeys(named)), told
    others = choose_backends(problem, machine, (), stored)
    if plan.every:
        return others, ()
    return (list(dict.fromkeys((*named, *others))) if plan.fallback else others[:1]), told


def every_layer(
    source: Checkpoint | Manifest,
    numbers: Sequence[int],
    machine: Machine,
    plan: RunPlan,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[LayerRun]:
    """Each of the layers `numbers`, as soon as it has run; one that cannot be run has the error.

    No layer's weights are held when the next one is opened.
    """
    for number in numbers:
        try:
            opened = (
                checkpoint_layer(source, number)
                if isinstance(source, Checkpoint)
                else converted_layer(source, number)
            )
            run = run_one(opened, machine, plan, progress)
        except MoectlError as error:
            run = LayerRun(number, error=error)
        except OSError as error:
            run = LayerRun(number, error=Unavailable(f"layer {number} cannot be read: {error}"))
        yield run
