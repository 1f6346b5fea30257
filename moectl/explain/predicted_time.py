"""How long moectl's own kernels should take, for an explanation in which they are an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..oracle.decision import Decision

if TYPE_CHECKING:
    from ..kernels.choice.predicted_times import PredictedTimes

TOKENS = (1, 64, 1024)
"""Numbers of tokens of the predictions."""

RUNNER = "moectl"
"""The runner of the kernels whose time is predicted."""


def predicted_of(decision: Decision) -> PredictedTimes | None:
    """Predicted times of a layer by moectl's own kernels; None if no usable candidate is theirs."""
    if decision.refused or not any(c.usable and c.backend.runner == RUNNER for c in decision.candidates):
        return None
    from ..kernels.choice.predicted_times import predicted_times

    return predicted_times(decision.problem, decision.inputs.device, TOKENS)
