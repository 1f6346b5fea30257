"""FlyDSL: AMD's int4 kernels for gfx950, through a separate method that only a request selects."""

from ....backend import Backend, Capability, ExpertsClass, FormatSupport, PackageNeed, WeightForm, only
from ....gpu_archs import gfx

FLYDSL = Backend(
    name="flydsl",
    engine_name="FLYDSL",
    variants=(
        ExpertsClass(
            "fused_flydsl_moe",
            Capability(
                arch=(gfx("gfx950"),),
                needs=(PackageNeed("aiter"),),
                formats=(FormatSupport(frozenset({"int4 group 32"})),),
                activations=only("silu"),
                ungated=False,
                zero_points=False,
            ),
        ),
    ),
    forms=(WeightForm("flydsl-int4"),),
)
