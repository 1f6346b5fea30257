"""Results of `moectl explain` in the form asked for, with their exit codes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import ExitCode
from ...explain import Explanation
from ...explain.counterfactual import why
from ...explain.decision_matrix import DecisionMatrix
from ...explain.explanation_diff import diff
from ...explain.replay import read_document
from ...problem.layer_ranges import ranges
from .. import text_blocks
from ..output import Output
from .command_line import ExplainCommand
from .options import AnswerOptions
from .sections import ExplanationView, document, sections
from .text import difference_blocks, matrix_blocks, matrix_lines, why_blocks, why_document, why_lines


class AnswerOutput:
    """Results in the form asked for, with their exit codes."""

    def __init__(self, out: Output, options: AnswerOptions) -> None:
        self.out, self.markdown, self.strict = out, options.md, options.strict
        self.view = ExplanationView(options.verbose, bool(options.measured))

    def show(self, document: dict[str, Any], blocks: Iterable[text_blocks.Block], brief: list[str]) -> None:
        """JSON, one line each, markdown, or text."""
        made = list(blocks)
        if self.markdown and not (self.out.as_json or self.out.quiet):
            self.out.text(text_blocks.markdown(made))
        else:
            self.out.result(document, lambda console: text_blocks.draw(made, console), brief)

    def code(self, explanation: Explanation) -> ExitCode:
        """1 where nothing serves, or under --strict a fallback does."""
        fallback = self.strict and any(group.fallback for group in explanation.groups)
        return ExitCode.DONE if explanation.usable and not fallback else ExitCode.FOUND

    def explanation(self, found: Explanation) -> ExitCode:
        """The whole explanation."""
        for note in dict.fromkeys(note for group in found.groups for note in group.evidence.notes):
            self.out.note(note)
        self.show(document(found), sections(found, self.view), brief(found, self.view.measured))
        return self.code(found)

    def matrix(self, found: DecisionMatrix) -> ExitCode:
        """The table; 1 where nothing serves every layer, or under --strict a cell is no first choice."""
        width = 10_000 if self.markdown else text_blocks.terminal_width()
        self.show(found.to_json(), matrix_blocks(found, width), matrix_lines(found))
        good = found.clean if self.strict else found.usable
        return ExitCode.DONE if good else ExitCode.FOUND

    def why(self, explanation: Explanation, command: ExplainCommand, name: str) -> ExitCode:
        """What would have to change; 1 where nothing helps some layers."""
        found = tuple((group.layers, why(group.decision.inputs, name)) for group in explanation.groups)
        whole = {**document(explanation), "why": why_document(command, found)}
        self.show(whole, why_blocks(command, found), why_lines(command, found))
        helped = all(answer.chosen or answer.answers for _, answer in found)
        return ExitCode.DONE if helped else ExitCode.FOUND

    def diff(self, explanation: Explanation, path: Path) -> ExitCode:
        """What changed since the document at `path`; 1 when a choice did."""
        now = document(explanation)
        found = diff(read_document(path), json.loads(json.dumps(now, default=list)))
        changed = "changed" if found.chosen_otherwise else "same"
        self.show({**now, "diff": found.to_json()}, difference_blocks(found), [changed])
        return ExitCode.FOUND if found.chosen_otherwise else self.code(explanation)


def brief(explanation: Explanation, measured: bool = False) -> list[str]:
    """One line a group: layers and the backend's name; then, with `measured`, one for each of its times.

    Of a time: layers, ``measured``, backend, tokens, routing, microseconds.
    """
    lines = []
    for group in explanation.groups:
        chosen = group.decision.chosen if group.decision.usable else None
        lines.append(f"{ranges(group.layers)}\t{chosen.backend.name if chosen else 'none'}")
        for row in group.evidence.measured.rows if measured else ():
            known = (row.backend, str(row.tokens), row.routing, f"{row.us:.1f}")
            lines.append("\t".join((ranges(group.layers), "measured", *known)))
    return lines
