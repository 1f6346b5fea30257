"""Layers on real weights: given backends, run, compared with the reference, and stressed.

Public here: `Machine`, `this_machine`, `choose_backends`, `run_layer`, `compare_backends`,
`plan_stress`, `run_one`; and `every_layer.every_layer`. All but `RunPlan` needs torch, and is imported when
it is asked for.
"""

from typing import TYPE_CHECKING, Any

from .plan import RunPlan

if TYPE_CHECKING:
    from .comparing import Compared, Outcome, compare_backends
    from .every_layer import LayerRun, run_one
    from .layer import RunResult, run_layer
    from .machine import (
        POLICY,
        BackendChoice,
        Machine,
        choose_backends,
        none_serves,
        this_machine,
    )
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
    "none_serves",
    "plan_stress",
    "run_layer",
    "run_one",
    "this_machine",
    "workload_of",
]

_MODULES = {
    "comparing": ("Compared", "Outcome", "compare_backends"),
    "every_layer": ("LayerRun", "run_one"),
    "layer": ("RunResult", "run_layer"),
    "machine": (
        *("POLICY", "BackendChoice", "Machine", "choose_backends"),
        *("none_serves", "this_machine"),
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
