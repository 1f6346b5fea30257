"""OpenAI's triton_kernels as moectl calls them: MXFP4 on Hopper."""

from functools import partial

from ...capabilities.external_kernels import TRITON_KERNELS
from ...environment.peers import PREFIX
from ...padding import padding
from ..archs import SM90
from ..backend import NAIVE, Backend, Capability, Form, Need, Variant, only
from .native import GATE
from .peer_rules import archs_of, offers_of, weighting

_LAYOUT = TRITON_KERNELS.weights[0].layout

PEER_TRITON_KERNELS = Backend(
    name="triton_kernels",
    engine_name="triton_kernels",
    variants=(
        Variant(
            "matmul_ogs",
            Capability(
                arch=archs_of(TRITON_KERNELS),
                needs=(
                    Need("triton_kernels", "routing.compute_expt_data", instead=(f"{PREFIX}triton_kernels",)),
                ),
                offers=offers_of(TRITON_KERNELS),
                ungated=bool(TRITON_KERNELS.ungated),
                spread=NAIVE,
                act_order=False,
                dtypes=only(*TRITON_KERNELS.weights[0].dtypes),
                rules=(
                    GATE,
                    *weighting(TRITON_KERNELS),
                ),
            ),
        ),
    ),
    forms=(Form(_LAYOUT, partial(padding, _LAYOUT)),),
    runner="triton_kernels",
    verified=(SM90,),
    note="The copy that vLLM carries; that of Triton's repository where it has the same functions.",
)
