"""Choosing a backend: one function over tables of data."""

from .decision import Candidate, Decision, Gate
from .registry import POLICIES, policy_named
from .select import OutOfScope, decide, select
from .selection_inputs import SelectionInputs, replay_inputs

__all__ = [
    "POLICIES",
    "Candidate",
    "Decision",
    "Gate",
    "OutOfScope",
    "SelectionInputs",
    "decide",
    "policy_named",
    "replay_inputs",
    "select",
]
