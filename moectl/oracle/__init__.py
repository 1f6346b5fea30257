"""Choosing a backend: one function over tables of data."""

from .decision import Candidate, Decision, Inputs, replay_inputs
from .registry import POLICIES, find_policy
from .select import OutOfScope, select

__all__ = [
    "POLICIES",
    "Candidate",
    "Decision",
    "Inputs",
    "OutOfScope",
    "find_policy",
    "replay_inputs",
    "select",
]
