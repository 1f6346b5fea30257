"""Checkpoints that are read as if they were of another model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moectl.integrations.model_experts import ModelExperts
from moectl.problem.moe_problem import MoEProblem


def apply_router_weights_to_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that integrations open apply router weights to their input, as those of Llama 4 do."""
    problem_of = ModelExperts.problem_of

    def on_input(experts: ModelExperts, *words: Any) -> MoEProblem:
        problem = problem_of(experts, *words)
        return replace(problem, routing=replace(problem.routing, weight_on_input=True))

    monkeypatch.setattr(ModelExperts, "problem_of", on_input)
