"""Decisions for several machines and deployments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..cache.backend_times import MeasuredTimes
from ..checkpoint.checkpoint import LayerGroup, Origin
from ..errors import NoBackend, UsageError
from ..oracle.selection_inputs import SelectionInputs
from ..problem.model_shape import UNKNOWN_MODEL, ModelShape
from ..problem.moe_problem import MoEProblem, Parallel
from .assumed_machines import AssumedMachine
from .assumptions import assume
from .explanation import Explanation, GroupExplanation, Question, explained, stage_bytes


@dataclass(frozen=True)
class MatrixCell:
    """One layer group on one machine in one deployment.

    `problem` is one rank's share, or the whole layer if it cannot be sharded. Without an `answer`, `refusal`
    says why: experts that cannot be sharded, or a format without a route.
    """

    machine: AssumedMachine
    parallel: Parallel
    layers: tuple[int, ...]
    answer: GroupExplanation | None
    refusal: str
    problem: MoEProblem

    @property
    def usable(self) -> bool:
        """True when a backend is chosen and works."""
        return self.answer is not None and self.answer.decision.usable

    def inputs(self, question: Question) -> SelectionInputs:
        """The inputs of the cell's decision, also if there is none."""
        measured = self.answer.decision.inputs.measured if self.answer else MeasuredTimes()
        return SelectionInputs(
            self.problem,
            self.machine.device,
            self.machine.packages,
            question.policy.name,
            question.backend,
            question.allow_fallback,
            measured,
            self.answer.decision.inputs.model if self.answer else UNKNOWN_MODEL,
        )

    def to_json(self, question: Question) -> dict[str, Any]:
        """One row of plain data, with the inputs of its decision."""
        row: dict[str, Any] = {
            "gpu": self.machine.key or self.machine.device.name,
            "arch": self.machine.device.arch,
            **asdict(self.parallel),
            "layers": list(self.layers),
            "usable": self.usable,
            "refusal": self.refusal or None,
            "decision": self.inputs(question).to_json(),
        }
        return row if self.answer is None else {**row, **answer_row(self.answer)}


def answer_row(answer: GroupExplanation) -> dict[str, Any]:
    """What a row says of the decision for its layers."""
    decision, chosen = answer.decision, answer.decision.chosen
    return {
        "backend": chosen.backend.name if chosen else None,
        "experts": chosen.variant.experts if chosen else None,
        "monolithic": chosen.variant.monolithic if chosen else None,
        "padded_hidden": decision.problem.dims.padded_hidden,
        "padded_intermediate": decision.problem.dims.padded_intermediate,
        "gates": [str(gate) for gate in decision.gates],
        "error": str(decision.error) if decision.error else None,
        "fallback": answer.fallback.kind if answer.fallback else None,
        "bytes": answer.memory.padded * len(answer.layers),
    }


def explanation_rows(explanation: Explanation, gpu: str = "") -> list[dict[str, Any]]:
    """The rows that a matrix of this one machine and deployment has; their decisions are those of the groups.

    `gpu` is the device's name as requested.
    """
    device = explanation.device
    return [
        {
            "gpu": gpu or device.name,
            "arch": device.arch,
            **asdict(explanation.parallel),
            "layers": list(group.layers),
            "usable": group.decision.usable,
            "refusal": None,
            **answer_row(group),
            "fits": explanation.fits,
        }
        for group in explanation.groups
    ]


@dataclass(frozen=True)
class DecisionMatrix:
    """Cells by layer group, machine and deployment, in this order."""

    origin: Origin
    question: Question
    machines: tuple[AssumedMachine, ...]
    parallels: tuple[Parallel, ...]
    cells: tuple[MatrixCell, ...]

    @property
    def usable(self) -> bool:
        """True when some machine and deployment has a backend for every layer group."""
        columns = len(self.machines) * len(self.parallels)
        return any(all(cell.usable for cell in self.cells[i::columns]) for i in range(columns))

    @property
    def clean(self) -> bool:
        """True when every cell has a backend, and none is a fallback."""
        return all(cell.usable and cell.answer and not cell.answer.fallback for cell in self.cells)

    def expert_bytes(self, machine: AssumedMachine, parallel: Parallel) -> int:
        """Bytes of every group's expert weights on one rank, as padded, without refused groups.

        With pipeline parallelism, of the stage that has the most.
        """
        return stage_bytes(
            cell.answer
            for cell in self.cells
            if cell.answer and (cell.machine, cell.parallel) == (machine, parallel)
        )

    def fits(self, machine: AssumedMachine, parallel: Parallel) -> bool | None:
        """False when the expert weights alone exceed the memory; None if that is unknown."""
        memory = machine.device.memory_bytes
        return self.expert_bytes(machine, parallel) <= memory if memory else None

    def to_json(self) -> dict[str, Any]:
        """Plain data: the inputs once, and a row for each cell."""
        return {
            "checkpoint": origin_json(self.origin),
            "policy": self.question.policy.name,
            "requested": self.question.backend,
            "usable": self.usable,
            "rows": [
                {**cell.to_json(self.question), "fits": self.fits(cell.machine, cell.parallel)}
                for cell in self.cells
            ],
        }


def origin_json(origin: Origin) -> dict[str, Any]:
    """Where a checkpoint was found, as plain data."""
    return {
        "name": origin.name,
        "source": origin.kind,
        "revision": origin.revision,
        "path": str(origin.path) if origin.path else None,
        "note": origin.note,
    }


def matrix(
    origin: Origin,
    groups: Sequence[LayerGroup],
    machines: Sequence[AssumedMachine],
    parallels: Sequence[Parallel],
    question: Question,
    model: ModelShape,
) -> DecisionMatrix:
    """The decisions of `question` for every layer group, machine and deployment."""
    cells = [
        _cell(group, machine, replace(question, parallel=parallel, others=()), model)
        for group in groups
        for machine in machines
        for parallel in parallels
    ]
    return DecisionMatrix(origin, question, tuple(machines), tuple(parallels), tuple(cells))


def _cell(group: LayerGroup, machine: AssumedMachine, question: Question, model: ModelShape) -> MatrixCell:
    whole = replace(assume(group.problem, question.assumptions), parallel=question.parallel)
    try:
        inputs = question.inputs(group.problem, machine.device, machine.packages, model)
        answer = explained(group.layers, inputs, group.sources, group.notes, details=group.details)
    except (UsageError, NoBackend) as error:
        return MatrixCell(machine, question.parallel, group.layers, None, error.what, whole)
    return MatrixCell(machine, question.parallel, group.layers, answer, "", inputs.problem)
