"""HPC: FP8 kernels for SM90, from a package of their own."""

from ....archs import SM90
from ....backend import Backend, Capability, Form, Need, Offer, Rule, Variant, only

HPC = Backend(
    name="hpc",
    engine_name="HPC",
    variants=(
        Variant(
            "HPCExperts",
            Capability(
                arch=(SM90,),
                needs=(Need("hpc"),),
                offers=(
                    Offer(frozenset({"fp8 per tensor"}), only("fp8 per tensor static")),
                    Offer(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),
                ),
                activations=only("silu"),
                ungated=False,
                rules=(
                    Rule(
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
    forms=(Form("plain"),),
    note="Last in the automatic order, where Triton, Marlin or Humming come first.",
)
