"""Layers on real weights: opened, given backends, run, compared with the reference, and stressed.

Public here: `Machine`, `this_machine`, `open_layer`, `choose_backends`, `run_layer`, `compare_backends`,
`plan_stress`, `run_one`, `every_layer`.
"""

from .comparing import Compared, Outcome, compare_backends
from .every_layer import LayerRun, RunPlan, every_layer, layer_numbers, open_source, run_one
from .layer import RunResult, open_layer, run_layer
from .machine import POLICY, Machine, choose_backends, left_out, measured_choice, none_serves, this_machine
from .stress import plan_stress
from .workload import Workload, workload_of

__all__ = [
    "POLICY",
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
    "layer_numbers",
    "left_out",
    "measured_choice",
    "none_serves",
    "open_layer",
    "open_source",
    "plan_stress",
    "run_layer",
    "run_one",
    "this_machine",
    "workload_of",
]
