"""What this tool runs itself: its own Triton kernels, and plain torch as the slow twin."""

from functools import partial

from ...padding import padding
from ..archs import sm
from ..backend import Backend, Capability, Form, Offer, Spread, Variant, only

_OFFERS = (Offer(frozenset({"mxfp4 group 32", "int4 group 32", "int4 group 64", "int4 group 128"})),)
_ACTIVATIONS = only("silu", "swigluoai")
_ONE_RANK = Spread(exchange=only("none"))

TRITON = Backend(
    name="triton",
    engine_name="triton",
    variants=(
        Variant(
            "grouped_gemm",
            Capability(
                arch=(sm(80),),
                offers=_OFFERS,
                activations=_ACTIVATIONS,
                ungated=False,
                spread=_ONE_RANK,
                act_order=False,
                zero_points=False,
                dtypes=only("bf16"),
                scales=only("E8M0", "BF16"),
            ),
        ),
    ),
    forms=(Form("moectl-mtile64", partial(padding, "moectl-mtile64")),),
    runner="triton",
)
TORCH = Backend(
    name="torch",
    engine_name="torch",
    variants=(Variant("torch", Capability(spread=_ONE_RANK, act_order=False)),),
    runner="torch",
    note="Plain torch: the reference for correctness, and the only choice without a supported GPU. "
    "Weights are decoded, activations stay in the model's dtype whatever the checkpoint declares.",
)
