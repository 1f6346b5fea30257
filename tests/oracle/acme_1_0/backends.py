"""Three backends: one behind a switch, one that always serves, and its twin for batched tokens."""

from moectl.environment.variables import Variable
from moectl.oracle.backend import (
    Backend,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    ParallelSupport,
    WeightForm,
    but,
    only,
)
from moectl.oracle.gpu_archs import CUDA, SM90
from moectl.problem.moe_problem import Align

QUICK_SWITCH = Variable("ACME_QUICK", "lets the quick runner serve")
OLD_SWITCH = Variable("ACME_FAST", "the former name of ACME_QUICK", status="removed", instead="ACME_QUICK")
VARIABLES = {variable.name: variable for variable in (QUICK_SWITCH, OLD_SWITCH)}

KERNELS = PackageNeed("acme_cubin", instead=("nvcc",))
_FOUR_BITS = (FormatSupport(frozenset({"mxfp4 group 32"})),)
_ROWS = (WeightForm("acme-rows", Align(512, 64)),)

QUICK = Backend(
    "quick",
    "QUICK",
    (
        ExpertsClass(
            "QuickRunner",
            Capability(
                arch=(SM90,),
                needs=(PackageNeed("acme_kernels", "moe.quick"), KERNELS),
                switches=(EnvironmentSwitch(QUICK_SWITCH, code="flag"),),
                formats=_FOUR_BITS,
                parallel=ParallelSupport(exchange=but("mesh")),
            ),
        ),
    ),
    forms=_ROWS,
)
STEADY = Backend(
    "steady",
    "STEADY",
    (ExpertsClass("SteadyRunner", Capability(arch=(CUDA,), formats=_FOUR_BITS)),),
    forms=_ROWS,
)
BATCHED = Backend(
    "steady_batched",
    "STEADY_BATCHED",
    (
        ExpertsClass(
            "BatchedRunner",
            Capability(arch=(CUDA,), formats=_FOUR_BITS, parallel=ParallelSupport(exchange=only("mesh"))),
            batched=True,
        ),
    ),
    forms=_ROWS,
)
