"""HPC: FP8 kernels for SM90, from the hpc package."""

from ....backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    WeightForm,
    only,
)
from ....gpu_archs import SM90

HPC = Backend(
    name="hpc",
    engine_name="HPC",
    variants=(
        ExpertsClass(
            "HPCExperts",
            Capability(
                arch=(SM90,),
                needs=(PackageNeed("hpc"),),
                formats=(
                    FormatSupport(frozenset({"fp8 per tensor"}), only("fp8 per tensor static")),
                    FormatSupport(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),
                ),
                activations=only("silu"),
                ungated=False,
                rules=(
                    BackendRule(
                        question="hidden size",
                        group="shape",
                        code="shape",
                        holds=lambda ask: ask.problem.dims.hidden % 128 == 0,
                        wanted=lambda ask: str(ask.problem.dims.hidden),
                        offered="a multiple of 128",
                    ),
                ),
            ),
        ),
    ),
    forms=(WeightForm("plain"),),
    note="Last in the automatic order, where Triton, Marlin or Humming come first.",
)
