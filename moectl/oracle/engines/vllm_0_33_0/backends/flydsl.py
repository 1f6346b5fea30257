"""FlyDSL: AMD's int4 kernels for gfx950, behind a method of their own that only a request reaches."""

from ....archs import gfx
from ....backend import Backend, Capability, Form, Need, Offer, Variant, only

FLYDSL = Backend(
    name="flydsl",
    engine_name="FLYDSL",
    variants=(
        Variant(
            "fused_flydsl_moe",
            Capability(
                arch=(gfx("gfx950"),),
                needs=(Need("aiter"),),
                offers=(Offer(frozenset({"int4 group 32"})),),
                activations=only("silu"),
                ungated=False,
                zero_points=False,
            ),
        ),
    ),
    forms=(Form("flydsl-int4"),),
)
