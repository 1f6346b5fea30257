"""Table and document of compiled kernels."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cache.measurement_keys import layer_key
from ...problem.layer_ranges import ranges
from ..output import count, table

if TYPE_CHECKING:
    from ...layer.warm_layers import WarmOutcome, WarmPlan

NUMBERS = ("kernels", "cached", "compiled", "seconds")


def outcome_document(outcome: WarmOutcome) -> dict[str, Any]:
    """An outcome as plain data."""
    result = outcome.result
    return {
        "layers": ranges(outcome.layer.layers),
        "layer": str(layer_key(outcome.layer.problem)),
        "backend": outcome.backend or None,
        "why": outcome.why,
        "kernels": result.kernels if result else 0,
        "cached": result.cached if result else 0,
        "compiled": result.compiled if result else 0,
        "seconds": result.seconds if result else 0.0,
        "processes": result.processes if result else 0,
        "failed": list(result.failed) if result else [],
        "taken": outcome.taken,
        "written": outcome.written,
    }


def lines_of(outcomes: Sequence[WarmOutcome]) -> list[str]:
    """A line per outcome for ``--quiet``: layers, kernels, compiled."""
    done = ((ranges(outcome.layer.layers), outcome.result) for outcome in outcomes)
    return [f"{layers}\t{result.kernels}\t{result.compiled}" for layers, result in done if result]


def draw_outcomes(outcomes: Sequence[WarmOutcome], plan: WarmPlan, cache: Path, console: Any) -> None:
    """Prints a table of outcomes, and where the kernels are."""
    rows = table("layers", "layer", "backend", *NUMBERS, right=NUMBERS)
    for outcome in outcomes:
        result = outcome.result
        numbers = ["-"] * len(NUMBERS)
        if result is not None:
            numbers = [str(result.kernels), str(result.cached), str(result.compiled), f"{result.seconds:.1f}"]
        words = str(layer_key(outcome.layer.problem))
        rows.add_row(ranges(outcome.layer.layers), words, outcome.backend or "-", *numbers)
    console.print(rows)
    console.print(f"for 1 to {plan.tokens} tokens on {plan.gpu.name} ({plan.gpu.arch})")
    console.print(f"kept in {cache}")
    if plan.source is not None:
        taken = sum(outcome.taken for outcome in outcomes)
        console.print(f"{count(taken, 'kernel')} taken from {plan.source}")
    if plan.target is not None:
        written = sum(outcome.written for outcome in outcomes)
        console.print(f"{count(written, 'kernel')} written to {plan.target}; there:")
        console.print(f"  moectl warm CKPT --from {shlex.quote(plan.target.name)} -m {plan.tokens}")
