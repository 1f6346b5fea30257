"""Agreement of the SGLang policy with recorded decisions, by stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from devtools.conformance import ComparedCell, ConformanceReport, compare_rows
from moectl.checkpoint import Checkpoint, open_checkpoint
from moectl.environment import find_device
from moectl.oracle import SelectionInputs, decide, engine_named, packages_from
from moectl.oracle.decision import ARGUMENTS, CAPABILITY, DTYPE, PLATFORM, Decision
from moectl.problem.moe_problem import Parallel

PROFILES = {"cuda": "sglang", "rocm": "sglang_rocm", "cpu": "sglang_cpu"}


class Answer(NamedTuple):
    """An outcome: `runner` is empty if SGLang fails, or continues without one; `method` names the class."""

    runner: str
    method: str = ""


class Comparison(NamedTuple):
    """One recorded cell: answers of both stages, recorded and ours; None for a stage that was not reached."""

    row: dict[str, Any]
    arguments: tuple[str, str]
    layer: tuple[Answer, Answer] | None


REFUSED = "refused"


@cache
def _checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(name, offline=True)


def decided(row: dict[str, Any], release: str) -> Decision:
    """Our decision for a recorded cell."""
    opened = _checkpoint(row["checkpoint"])
    arch, _, aiter = row["device"].partition(" ")
    device = find_device(arch)
    profile = PROFILES[device.platform] + ("_aiter" if aiter else "")
    parallel = Parallel(row["tp"], row["dp"], row["ep"], row["a2a"] or "none")
    problem = opened.groups[0].problem.on(parallel)
    engine = engine_named(release)
    packages = packages_from(profile, engine=engine)
    inputs = SelectionInputs(problem, device, packages, engine.name, row["forced"])
    return decide(replace(inputs, model=opened.model))


def compared(row: dict[str, Any], release: str) -> Comparison:
    """A recorded cell beside our answer."""
    decision = decided(row, release)
    made = decision.arguments
    assert made is not None
    stated = row["arguments"]
    theirs = REFUSED if "error" in stated else f"{stated['runner']} {stated['a2a']}"
    refused = any(gate.kind == ARGUMENTS for gate in decision.gates)
    ours = REFUSED if refused else f"{made.request or 'auto'} {made.exchange}"
    if REFUSED in (theirs, ours):
        return Comparison(row, (theirs, ours), None)
    layer = row["layer"]
    recorded = Answer("")
    if "error" not in layer and layer["runner"]:
        recorded = Answer(layer["runner"], layer["scheme"] or layer["method"])
    late = any(gate.kind in (CAPABILITY, DTYPE, PLATFORM) for gate in decision.gates)
    answer = Answer("")
    if decision.chosen is not None and not decision.error and not late:
        answer = Answer(decision.chosen.engine_name, decision.chosen.variant.experts)
    return Comparison(row, (theirs, ours), (recorded, answer))


def _cell(row: dict[str, Any], release: str) -> ComparedCell:
    found = compared(row, release)
    named = {name: row[name] for name in ("tp", "dp", "ep", "a2a", "forced") if row[name]}
    answers: dict[str, tuple[object, object]] = {"arguments": found.arguments}
    if found.layer is not None:
        answers["layer"] = found.layer
    axes = [("device", row["device"]), ("checkpoint", row["checkpoint"])]
    return ComparedCell(f"{row['checkpoint']} {row['device']} {named}", axes, answers)


def compare_recording(path: Path, release: str) -> ConformanceReport:
    """Agreement of the rules of `release` with a recording, by device, by checkpoint and by stage.

    Raises UsageError for a file that is no such recording.
    """
    return compare_rows(
        path, lambda row: {"arguments", "forced", "a2a"} <= row.keys(), lambda row: _cell(row, release)
    )
