"""FlashInfer's CUTLASS fused MoE on SM90, as this tool calls it."""

from ...capabilities.flashinfer import CUTLASS
from ..archs import SM90
from ..backend import NAIVE, Backend, Capability, Variant
from .peer_flashinfer import declared, forms, needs, offers, rules

PEER_FLASHINFER_CUTLASS = Backend(
    name="flashinfer_cutlass",
    engine_name="flashinfer_cutlass",
    variants=(
        Variant(
            "cutlass_fused_moe",
            Capability(
                arch=(SM90,),
                needs=needs(kernel.routed for kernel in CUTLASS),
                offers=offers(CUTLASS),
                spread=NAIVE,
                act_order=False,
                rules=rules(declared(CUTLASS)),
            ),
        ),
    ),
    forms=forms(CUTLASS),
    runner="flashinfer_cutlass",
    verified=(SM90,),
    note="FlashInfer compiles these kernels when they are first called, for many minutes, unless they are "
    "in its cache: it comes last, and is taken when it is asked for.",
)
