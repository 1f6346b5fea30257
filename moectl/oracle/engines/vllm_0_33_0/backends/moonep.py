"""MoonEP: experts that work in the layout of their own token exchange."""

from ....archs import CUDA
from ....backend import Backend, Capability, Form, Offer, Spread, Variant, only

MOONEP = Backend(
    name="moonep",
    engine_name="MOONEP",
    variants=(
        Variant(
            "MoonEPExperts",
            Capability(
                arch=(CUDA,),
                offers=(Offer(frozenset({"bf16"})),),
                activations=only("silu"),
                ungated=False,
                spread=Spread(exchange=only("moonep"), eplb=False),
            ),
        ),
    ),
    forms=(Form("moonep"),),
)
