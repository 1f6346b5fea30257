"""Runs layers on real weights and checks the results against the reference.

`choose_backends` says which backends support a layer on a `RunMachine`, `run_layer` runs one of them,
`compare_backends` several, `plan_stress` prepares edge cases, and `run_one` does what a `RunPlan` asks for.
All but `RunPlan` needs torch and is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from .run_plan import POLICY, RunPlan

if TYPE_CHECKING:
    from .all_layers import LayerRun, run_one
    from .backend_comparison import BackendComparison, BackendOutcome, compare_backends
    from .one_layer import RunResult, run_layer
    from .run_machine import (
        BackendChoice,
        RunMachine,
        choose_backends,
        this_machine,
        unsupported_error,
    )
    from .stress import plan_stress
    from .workload import Workload, workload_of

__all__ = [
    "POLICY",
    "BackendChoice",
    "BackendComparison",
    "BackendOutcome",
    "LayerRun",
    "RunMachine",
    "RunPlan",
    "RunResult",
    "Workload",
    "choose_backends",
    "compare_backends",
    "plan_stress",
    "run_layer",
    "run_one",
    "this_machine",
    "unsupported_error",
    "workload_of",
]

_MODULES = {
    "backend_comparison": ("BackendComparison", "BackendOutcome", "compare_backends"),
    "all_layers": ("LayerRun", "run_one"),
    "one_layer": ("RunResult", "run_layer"),
    "run_machine": (
        *("BackendChoice", "RunMachine", "choose_backends"),
        *("unsupported_error", "this_machine"),
    ),
    "stress": ("plan_stress",),
    "workload": ("Workload", "workload_of"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
