"""Results of `moectl explain` in the requested format, with their exit codes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ExitCode, MoectlError
from ...explain import Explanation, Question
from ...explain.assumed_machines import AssumedMachine
from ...explain.counterfactual import why
from ...explain.decision_matrix import DecisionMatrix, Unopened, matrix_document
from ...explain.engine_answer import EngineAnswer
from ...explain.explanation_diff import diff
from ...explain.release_changes import DecisionChange
from ...explain.replay import read_document
from ...oracle.registry import versioned
from ...problem.layer_ranges import ranges
from .. import text_blocks
from ..output import Output, count, size
from .asked_text import asked_blocks, asked_lines
from .command_line import ExplainCommand
from .engines_text import engine_blocks, engine_lines, engines_document
from .matrix_memory import memory_blocks
from .matrix_text import matrix_blocks, matrix_lines, several_blocks, several_lines
from .options import ALL, AnswerOptions
from .release_text import release_blocks, release_lines
from .sections import document, measured_blocks, sections
from .summary import summary_blocks
from .text import difference_blocks, why_blocks, why_document, why_lines

NOTHING_FOUND: Mapping[str, Any] = {
    "installed_engine": None,
    "python": None,
    "warnings": [],
    "assumptions": [],
}
"""What a JSON document says of the environment that was looked into, without one."""


class AnswerOutput:
    """Results in the requested format, with their exit codes."""

    def __init__(self, out: Output, options: AnswerOptions, command: str = "") -> None:
        self.out, self.markdown, self.strict = out, options.md, options.strict
        self.html, self.command = options.html, command
        self.stated = ""
        """Options besides GPU and deployment, for the commands of a page."""
        self.beside: list[dict[str, Any]] = []
        """Documents of further engines and releases, for a page."""
        self.verbose, self.measured = options.verbose, bool(options.measured)
        self.environment: dict[str, Any] = dict(NOTHING_FOUND)

    def look_at(self, machines: Sequence[AssumedMachine], notes: Sequence[str] | None = None) -> None:
        """Warn of what may make the answer wrong on `machines`, and keep it for JSON.

        `notes` say what is assumed of them, by default in their own words.
        """
        warnings = list(dict.fromkeys(text for machine in machines for text in machine.warnings))
        for warning in warnings:
            self.out.warn(warning)
        if any(machine.device.platform == "cpu" and not machine.key for machine in machines):
            self.out.note(
                "no GPU was found, so this is the answer for the CPU; --gpu NAME asks for another device "
                "(moectl list gpus)"
            )
        if notes is None:
            notes = list(dict.fromkeys(note for machine in machines for note in machine.notes))
        first = machines[0]
        installed = {"installed_engine": first.installed, "python": first.python or None}
        self.environment = {**installed, "warnings": warnings, "assumptions": list(notes)}

    def keep(self, recorded: Mapping[str, Any]) -> None:
        """Repeat in JSON what a `recorded` document says of its environment."""
        self.environment = {name: recorded.get(name, value) for name, value in NOTHING_FOUND.items()}

    def show(self, document: dict[str, Any], blocks: Iterable[text_blocks.Block], brief: list[str]) -> None:
        """Print JSON, brief lines, markdown, or text; with --html, write the page and print its size."""
        document = {**document, **self.environment}
        if self.html is not None:
            brief = [self._write_page(self.html, document)]
            blocks = [text_blocks.TextLine(brief[0])]
        blocks = list(blocks)
        if self.markdown and not (self.out.as_json or self.out.quiet):
            self.out.text(text_blocks.markdown(blocks))
        else:
            self.out.result(document, lambda console: text_blocks.draw(blocks, console), brief)

    def _write_page(self, path: Path, document: Mapping[str, Any]) -> str:
        """Write the page of a document; returns what it holds, in words."""
        from ...files.atomic import write_file
        from .page import html_page

        # As they are read back from a file: the page has no other source than JSON documents.
        plain, *others = (json.loads(self.out.json(each, indent=None)) for each in (document, *self.beside))
        page = html_page([plain, *others], self.command, self.stated)
        write_file(path, page)
        columns = {(row["gpu"], *(row[name] for name in ("tp", "dp", "pp", "ep"))) for row in plain["rows"]}
        models = len({row["checkpoint"] for row in plain["rows"]})
        held = [count(models, "model"), count(len(columns), "column")]
        held += [f"{1 + len(others)} engines and releases"] if others else []
        return f"{path}: {', '.join([*held, size(len(page))])}"

    def code(self, explanation: Explanation) -> ExitCode:
        """FOUND if a layer has no backend or, with --strict, a fallback; else DONE."""
        fallback = self.strict and any(group.fallback for group in explanation.groups)
        return ExitCode.DONE if explanation.usable and not fallback else ExitCode.FOUND

    def explanation(
        self, explanation: Explanation, gpu: str = "", asked: EngineAnswer | MoectlError | None = None
    ) -> ExitCode:
        """Print the whole explanation; `gpu` is the device's name as requested.

        `asked` is the engine's own answer, or why it gave none: FOUND if it differs, else the error's code.
        """
        for note in dict.fromkeys(note for group in explanation.groups for note in group.evidence.notes):
            self.out.note(note)
        lines = brief(explanation, self.measured)
        blocks = [*summary_blocks(explanation, alone=not (self.verbose or self.markdown))]
        if self.markdown:
            blocks.append(
                text_blocks.Details("every fact and candidate", tuple(sections(explanation, self.measured)))
            )
        elif self.verbose:
            blocks += sections(explanation, self.measured)
        elif self.measured:
            blocks += measured_blocks(explanation)
        whole, code = document(explanation, gpu), self.code(explanation)
        if isinstance(asked, MoectlError):
            whole["asked"] = {"failure": asked.to_json()}
            code = max(code, asked.exit_code)
        elif asked is not None:
            whole["asked"] = asked.to_json()
            blocks += asked_blocks(asked)
            lines += asked_lines(asked)
            code = code if asked.same else ExitCode.FOUND
        self.show(whole, blocks, lines)
        if isinstance(asked, MoectlError):
            self.out.complain(asked)
        return code

    def matrices(
        self,
        matrices: Sequence[DecisionMatrix],
        question: Question,
        unopened: Sequence[Unopened] = (),
        several: bool = False,
    ) -> ExitCode:
        """Print the table, with `several` one of all checkpoints.

        FOUND if some checkpoint has no cell that supports every layer or, with --strict, any cell is a
        fallback; the highest code of `unopened` checkpoints if it is higher.
        """
        width = 10_000 if self.markdown else text_blocks.terminal_width()
        document = matrix_document(matrices, question, unopened)
        if several:
            self.show(document, several_blocks(matrices, width, self.verbose), several_lines(matrices))
        else:
            (matrix,) = matrices
            blocks = [*matrix_blocks(matrix, width, self.verbose), *memory_blocks(matrix)]
            self.show(document, blocks, matrix_lines(matrix))
        passed = all(matrix.clean if self.strict else matrix.usable for matrix in matrices)
        codes = [ExitCode.DONE if passed else ExitCode.FOUND, *(item.error.exit_code for item in unopened)]
        return max(codes)

    def engines(self, matrices: Sequence[DecisionMatrix]) -> ExitCode:
        """Print a line for each engine, whose decision for one checkpoint is a matrix.

        FOUND if no engine supports every layer or, with --strict, one of them does not or falls back.
        """
        document = {
            **matrix_document(matrices[:1], matrices[0].question),
            "policy": ALL,
            "usable": any(matrix.usable for matrix in matrices),
            "rows": [row for matrix in matrices for row in matrix.rows()],
            "engines": engines_document(matrices),
        }
        blocks = [*engine_blocks(matrices, alone=not self.verbose)]
        if self.verbose:
            for explanation in filter(None, (matrix.explanation for matrix in matrices)):
                blocks += [*summary_blocks(explanation, alone=False), *sections(explanation)]
        self.show(document, blocks, engine_lines(matrices))
        passed = all(it.clean for it in matrices) if self.strict else document["usable"]
        return ExitCode.DONE if passed else ExitCode.FOUND

    def why(self, explanation: Explanation, command: ExplainCommand, name: str) -> ExitCode:
        """Print what would have to change; FOUND if nothing helps some layer."""
        answers = tuple((group.layers, why(group.decision.inputs, name)) for group in explanation.groups)
        whole = {**document(explanation, command.machine.key), "why": why_document(command, answers)}
        self.show(whole, why_blocks(command, answers), why_lines(command, answers))
        helped = all(answer.chosen or answer.answers for _, answer in answers)
        return ExitCode.DONE if helped else ExitCode.FOUND

    def diff(self, explanation: Explanation, path: Path) -> ExitCode:
        """Print what changed since the document at `path`; FOUND if a choice did."""
        now = document(explanation)
        difference = diff(read_document(path), json.loads(json.dumps(now, default=list)))
        verdict = "changed" if difference.chosen_otherwise else "same"
        self.show({**now, "diff": difference.to_json()}, difference_blocks(difference), [verdict])
        return ExitCode.FOUND if difference.chosen_otherwise else self.code(explanation)

    def releases(
        self,
        before: Question,
        after: Question,
        changes: Sequence[DecisionChange],
        decisions: int,
        uncovered: int,
        unopened: Sequence[Unopened],
    ) -> ExitCode:
        """Print what changed between the policies of two questions, in `decisions` that both have rules for.

        FOUND if anything did; the highest code of `unopened` checkpoints if it is higher.
        """
        names = (before.policy.name, after.policy.name)
        document = {
            **matrix_document((), after, unopened),
            "usable": not unopened,
            "releases": {
                "from": names[0],
                "to": names[1],
                "decisions": decisions,
                "uncovered": uncovered,
                "changes": [change.to_json() for change in changes],
            },
        }
        blocks = release_blocks(versioned(names[0]), versioned(names[1]), changes, decisions, uncovered)
        self.show(document, blocks, release_lines(changes))
        return max([ExitCode.FOUND if changes else ExitCode.DONE, *(it.error.exit_code for it in unopened)])


def brief(explanation: Explanation, measured: bool = False) -> list[str]:
    """One line per group: layers and backend; with `measured`, also one per measured time.

    A time's line has layers, ``measured``, backend, tokens, routing, microseconds.
    """
    lines = []
    for group in explanation.groups:
        chosen = group.decision.chosen if group.decision.usable else None
        lines.append(f"{ranges(group.layers)}\t{chosen.backend.name if chosen else 'none'}")
        for row in group.evidence.measured.rows if measured else ():
            cells = (row.backend, str(row.tokens), row.routing, f"{row.us:.1f}")
            lines.append("\t".join((ranges(group.layers), "measured", *cells)))
    return lines
