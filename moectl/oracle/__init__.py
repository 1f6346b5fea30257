"""Backend selection: one function over tables of data."""

from .decision import Candidate, Decision, Gate
from .engine import Engine
from .machine_packages import packages_from
from .registry import ENGINES, engine_named, policy_named
from .select import OutOfScope, decide, select
from .selection_inputs import SelectionInputs, replay_inputs

__all__ = [
    "ENGINES",
    "Candidate",
    "Decision",
    "Engine",
    "Gate",
    "OutOfScope",
    "SelectionInputs",
    "decide",
    "engine_named",
    "packages_from",
    "policy_named",
    "replay_inputs",
    "select",
]
