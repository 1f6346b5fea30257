"""Three backends: one behind a switch, one that always serves, and its twin for batched tokens."""

from moectl.environment.variables import Variable
from moectl.oracle.archs import CUDA, SM90
from moectl.oracle.backend import Backend, Capability, Form, Need, Offer, Spread, Switch, Variant, but, only
from moectl.problem import Align

QUICK_SWITCH = Variable("ACME_QUICK", "lets the quick runner serve")
OLD_SWITCH = Variable("ACME_FAST", "the former name of ACME_QUICK", status="removed", instead="ACME_QUICK")
VARIABLES = {variable.name: variable for variable in (QUICK_SWITCH, OLD_SWITCH)}

KERNELS = Need("acme_cubin", instead=("nvcc",))
_FOUR_BITS = (Offer(frozenset({"mxfp4 group 32"})),)
_ROWS = (Form("acme-rows", Align(512, 64)),)

QUICK = Backend(
    "quick",
    "QUICK",
    (
        Variant(
            "QuickRunner",
            Capability(
                arch=(SM90,),
                needs=(Need("acme_kernels", "moe.quick"), KERNELS),
                switches=(Switch(QUICK_SWITCH, code="flag"),),
                offers=_FOUR_BITS,
                spread=Spread(exchange=but("mesh")),
            ),
        ),
    ),
    forms=_ROWS,
)
STEADY = Backend(
    "steady", "STEADY", (Variant("SteadyRunner", Capability(arch=(CUDA,), offers=_FOUR_BITS)),), forms=_ROWS
)
BATCHED = Backend(
    "steady_batched",
    "STEADY_BATCHED",
    (
        Variant(
            "BatchedRunner",
            Capability(arch=(CUDA,), offers=_FOUR_BITS, spread=Spread(exchange=only("mesh"))),
            batched=True,
        ),
    ),
    forms=_ROWS,
)
