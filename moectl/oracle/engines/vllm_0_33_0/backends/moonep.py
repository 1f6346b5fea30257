"""MoonEP: experts that work in the layout of their own token exchange."""

from ....backend import Backend, Capability, ExpertsClass, FormatSupport, ParallelSupport, WeightForm, only
from ....gpu_archs import CUDA

MOONEP = Backend(
    name="moonep",
    engine_name="MOONEP",
    variants=(
        ExpertsClass(
            "MoonEPExperts",
            Capability(
                arch=(CUDA,),
                formats=(FormatSupport(frozenset({"bf16"})),),
                activations=only("silu"),
                ungated=False,
                parallel=ParallelSupport(exchange=only("moonep"), eplb=False),
            ),
        ),
    ),
    forms=(WeightForm("moonep"),),
)
