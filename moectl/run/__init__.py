"""Layers on real weights: given backends, run, compared with the reference, and stressed.

Public here: `Machine`, `this_machine`, `choose_backends`, `run_layer`, `compare_backends`,
`plan_stress`, `run_one`, `every_layer`.
"""

from .comparing import Compared, Outcome, compare_backends
from .every_layer import LayerRun, RunPlan, every_layer, run_one
from .layer import RunResult, run_layer
from .machine import POLICY, BackendChoice, Machine, choose_backends, none_serves, this_machine
from .stress import plan_stress
from .workload import Workload, workload_of

__all__ = [
    "POLICY",
    "BackendChoice",
    "Compared",
    "LayerRun",
    "Machine",
    "Outcome",
    "RunPlan",
    "RunResult",
    "Workload",
    "choose_backends",
    "compare_backends",
    "every_layer",
    "none_serves",
    "plan_stress",
    "run_layer",
    "run_one",
    "this_machine",
    "workload_of",
]
