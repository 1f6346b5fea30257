"""Choosing a backend: one function over tables of data."""

from .decision import Candidate, Decision, Gate, Inputs, replay_inputs
from .registry import POLICIES, policy_named
from .select import OutOfScope, select

__all__ = [
    "POLICIES",
    "Candidate",
    "Decision",
    "Gate",
    "Inputs",
    "OutOfScope",
    "policy_named",
    "replay_inputs",
    "select",
]
