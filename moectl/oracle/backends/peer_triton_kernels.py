"""OpenAI's triton_kernels as moectl calls them: MXFP4 on Hopper."""

from functools import partial

from ...environment.peers import PREFIX
from ...padding import padding
from ...schemes import MXFP4
from ..archs import SM90
from ..backend import NAIVE, Backend, Capability, Form, Need, Offer, Variant, only
from ..keys import exact_key
from .native import GATE
from .peer_rules import WEIGHT_AT_THE_END

_LAYOUT = "triton-hopper"

PEER_TRITON_KERNELS = Backend(
    name="triton_kernels",
    engine_name="triton_kernels",
    variants=(
        Variant(
            "matmul_ogs",
            Capability(
                arch=(SM90,),
                needs=(
                    Need("triton_kernels", "routing.compute_expt_data", instead=(f"{PREFIX}triton_kernels",)),
                ),
                offers=(Offer(frozenset({exact_key(MXFP4)})),),
                ungated=False,
                spread=NAIVE,
                act_order=False,
                dtypes=only("bf16"),
                rules=(
                    GATE,
                    WEIGHT_AT_THE_END,
                ),
            ),
        ),
    ),
    forms=(Form(_LAYOUT, partial(padding, _LAYOUT)),),
    runner="triton_kernels",
    verified=(SM90,),
    note="The copy that vLLM carries; that of Triton's repository where it has the same functions.",
)
