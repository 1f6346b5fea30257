"""The questions of `--ask-engine` for many checkpoints, GPUs and deployments, as one grid of cells."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moectl.checkpoint.checkpoint import Checkpoint
from moectl.errors import NoBackend, Unavailable, UsageError
from moectl.explain.assumed_machines import machine
from moectl.explain.engine_answer import FieldDifference, differences
from moectl.explain.explanation import Question, explain
from moectl.oracle.decision import Decision
from moectl.oracle.engine import Engine
from moectl.problem.moe_problem import Parallel

from ..conformance.grid import CELL

Cell = dict[str, Any]


@dataclass(frozen=True)
class AskedLayers:
    """A group of layers of a checkpoint on one device: the cell that asks about it, and our decision."""

    name: str
    cell: Cell
    decision: Decision


@dataclass
class CatalogueQuestions:
    """Every question that can be asked of `engine`, with the tables that its cells name.

    `left_out` counts the deployments that cannot be asked about, by reason.
    """

    engine: Engine
    asked: list[AskedLayers] = field(default_factory=list)
    tables: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"MODELS": {}, "SCHEMES": {}, "DEVICES": {}, "PROFILES": {}, "PARALLEL": {}}
    )
    left_out: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        checkpoint: Checkpoint,
        gpu: str,
        parallel: Parallel,
        backend: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Ask about every layer group of `checkpoint` in one deployment, with the default packages."""
        assert self.engine.own_code is not None
        here = machine(gpu, None, env or {}, self.engine)
        asked = Question(self.engine.policy, parallel, backend)
        try:
            explanation = explain(checkpoint, here.device, here.packages, asked)
            groups = [
                (checkpoint.group_of(each.layers[0]), each.decision.inputs) for each in explanation.groups
            ]
            document = self.engine.own_code.question(checkpoint, groups)
        except (UsageError, NoBackend, Unavailable) as refusal:
            self.left_out[f"{checkpoint.origin.name}: {refusal}"] += 1
            return
        packages, grid, row = here.packages, document["grid"], document["device"]
        profile = {
            "packages": [name for name in packages.versions if packages.has(name)],
            "env": {name: value for name, value in packages.env.items() if self.engine.reads(name)},
        }
        names = {
            "scheme": self._named("SCHEMES", [grid["SCHEMES"]["asked"][0], []]),
            "device": self._named("DEVICES", row),
            "profile": self._named("PROFILES", profile),
            "parallel": self._named("PARALLEL", grid["PARALLEL"]["asked"]),
        }
        title = f"{checkpoint.origin.name} {gpu} tp={parallel.tp} dp={parallel.dp} ep={parallel.ep}"
        for group, cell in zip(explanation.groups, document["cells"], strict=True):
            model = self._named("MODELS", grid["MODELS"][cell["model"]])
            layers = f"{title} {backend or ''} layer {group.layers[0]}"
            named = {**cell, **names, "model": model}
            self.asked.append(AskedLayers(layers, {name: named[name] for name in CELL}, group.decision))

    def _named(self, table: str, row: Any) -> str:
        """The name of `row` in a table, which gets it if it is not there."""
        rows = self.tables[table]
        known = next((name for name, other in rows.items() if other == row), None)
        name = known or f"{table.lower()}-{len(rows)}"
        rows[name] = row
        return name

    def content(self, cell: Cell) -> str:
        """What `cell` asks, without names: the same in every run."""
        tables = {"scheme": "SCHEMES", "model": "MODELS", "device": "DEVICES"}
        tables |= {"profile": "PROFILES", "parallel": "PARALLEL"}
        rows = {name: self.tables[table][cell[name]] for name, table in tables.items()}
        return json.dumps({**rows, "forced": cell["forced"]}, sort_keys=True, default=str)

    def cells(self) -> dict[str, Cell]:
        """The cells by their content, each once."""
        return {self.content(each.cell): each.cell for each in self.asked}

    def compared(
        self, rows: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[AskedLayers, Mapping[str, Any], tuple[FieldDifference, ...]]]:
        """Each question with the engine's answer, by the content of its cell, and where ours differs."""
        for each in self.asked:
            row = rows[self.content(each.cell)]
            found = () if row.get("not_run") else differences(row, each.decision)
            yield each, row, found
