"""Decisions for several machines and deployments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import Any

from ..cache.backend_times import MeasuredTimes
from ..checkpoint.checkpoint import Checkpoint, LayerGroup, Origin
from ..errors import MoectlError, NoBackend, UsageError
from ..oracle.select import OutOfScope
from ..oracle.selection_inputs import SelectionInputs
from ..problem.model_shape import UNKNOWN_MODEL, ModelShape
from ..problem.moe_problem import MoEProblem, Parallel
from ..problem.other_weights import OtherWeights
from .answer_rows import answer_row
from .assumed_machines import AssumedMachine
from .assumptions import assume
from .explanation import Explanation, GroupExplanation, Question, checkpoint_json, explained, memory_with
from .rank_memory import RankMemory


@dataclass(frozen=True)
class MatrixCell:
    """One layer group on one machine in one deployment.

    `problem` is one rank's share, or the whole layer if it cannot be sharded. Without an `answer`, `refusal`
    says why: experts that cannot be sharded, or a format without a route; `uncovered` in the latter case.
    """

    machine: AssumedMachine
    parallel: Parallel
    layers: tuple[int, ...]
    answer: GroupExplanation | None
    refusal: str
    problem: MoEProblem
    uncovered: bool = False

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


@dataclass(frozen=True)
class DecisionMatrix:
    """Cells of a checkpoint by layer group, machine and deployment, in this order.

    `other_weights`: the model's weights that are no routed experts, None if they are not known.
    """

    origin: Origin
    question: Question
    machines: tuple[AssumedMachine, ...]
    parallels: tuple[Parallel, ...]
    cells: tuple[MatrixCell, ...]
    other_weights: OtherWeights | None = None

    @property
    def usable(self) -> bool:
        """True when some machine and deployment has a backend for every layer group."""
        return any(all(cell.usable for cell in self.cells[i :: self.columns]) for i in range(self.columns))

    @property
    def clean(self) -> bool:
        """True when every cell has a backend, and none is a fallback."""
        return all(cell.usable and cell.answer and not cell.answer.fallback for cell in self.cells)

    @property
    def columns(self) -> int:
        """Machines times deployments: every so many cells belong to one of them."""
        return len(self.machines) * len(self.parallels)

    @property
    def explanation(self) -> Explanation | None:
        """The answers of a matrix of one machine and one deployment; None where a layer group is refused."""
        answers = tuple(cell.answer for cell in self.cells if cell.answer)
        if len(answers) < len(self.cells):
            return None
        (machine,), (parallel,) = self.machines, self.parallels
        policy = self.question.policy.name
        return Explanation(
            self.origin, machine.device, machine.packages, parallel, policy, answers, self.other_weights
        )

    @cached_property
    def memories(self) -> tuple[RankMemory | None, ...]:
        """Memory of one GPU for each machine and deployment, None if some layer group is refused."""
        return tuple(self._memory(self.cells[i :: self.columns]) for i in range(self.columns))

    def _memory(self, cells: Sequence[MatrixCell]) -> RankMemory | None:
        answers = [cell.answer for cell in cells if cell.answer]
        if len(answers) < len(cells):
            return None
        return memory_with(answers, self.other_weights, self.question.policy.name, cells[0].machine.device)

    def rows(self) -> list[dict[str, Any]]:
        """A row of plain data for each cell."""
        return [
            answer_row(
                self.origin.name,
                cell.machine.key,
                cell.inputs(self.question),
                cell.layers,
                cell.answer,
                cell.refusal,
                memory,
            )
            for cell, memory in zip(self.cells, cycle(self.memories), strict=False)
        ]


@dataclass(frozen=True)
class Unopened:
    """A checkpoint that could not be opened, as it was named, and why."""

    name: str
    error: MoectlError


def matrix_document(
    matrices: Sequence[DecisionMatrix], question: Question, unopened: Sequence[Unopened] = ()
) -> dict[str, Any]:
    """Plain data for a matrix of each checkpoint: the checkpoints once, and a row for each cell."""
    return {
        "checkpoints": [checkpoint_json(matrix.origin, matrix.other_weights) for matrix in matrices],
        "policy": question.policy.name,
        "requested": question.backend,
        "usable": bool(matrices) and not unopened and all(matrix.usable for matrix in matrices),
        "errors": [{"checkpoint": item.name, **item.error.to_json()} for item in unopened],
        "rows": [row for matrix in matrices for row in matrix.rows()],
    }


def matrix(
    checkpoint: Checkpoint,
    machines: Sequence[AssumedMachine],
    parallels: Sequence[Parallel],
    question: Question,
) -> DecisionMatrix:
    """The decisions of `question` for every layer group, machine and deployment."""
    cells = [
        _cell(group, machine, replace(question, parallel=parallel, others=()), checkpoint.model)
        for group in checkpoint.groups
        for machine in machines
        for parallel in parallels
    ]
    return DecisionMatrix(
        checkpoint.origin,
        question,
        tuple(machines),
        tuple(parallels),
        tuple(cells),
        checkpoint.other_weights,
    )


def _cell(group: LayerGroup, machine: AssumedMachine, question: Question, model: ModelShape) -> MatrixCell:
    whole = replace(assume(group.problem, question.assumptions), parallel=question.parallel)
    try:
        inputs = question.inputs(group.problem, machine.device, machine.packages, model)
        answer = explained(group.layers, inputs, group.sources, group.notes, details=group.details)
    except (UsageError, NoBackend) as error:
        uncovered = isinstance(error, OutOfScope)
        return MatrixCell(machine, question.parallel, group.layers, None, error.what, whole, uncovered)
    return MatrixCell(machine, question.parallel, group.layers, answer, "", answer.problem)
