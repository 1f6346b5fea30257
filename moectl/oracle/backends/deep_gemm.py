"""DeepGEMM: FP8 activations with FP4 weights on Blackwell."""

from ...problem import Align
from ...schemes import ActFormat
from ..backend import (
    NO_NVLINK_EXCHANGE,
    SM10X,
    SM12X,
    Backend,
    Capability,
    Form,
    Need,
    Offer,
    Switch,
    Variant,
    only,
)

DEEP_GEMM_MXFP4 = Backend(
    name="deep_gemm",
    engine_name="DEEPGEMM_MXFP4",
    variants=(
        Variant(
            "DeepGemmFP4Experts",
            Capability(
                arch=(SM10X, SM12X),
                needs=(Need("deep_gemm"),),
                switches=(Switch("VLLM_USE_DEEP_GEMM"),),
                offers=(Offer(frozenset({"mxfp4 group 32"}), only("fp8 group 128 dynamic")),),
                activations=only("silu", "swiglustep", "situ"),
                ungated=False,
                spread=NO_NVLINK_EXCHANGE,
            ),
        ),
    ),
    act=ActFormat("fp8", 8, (1, 128)),
    forms=(Form("deep-gemm", Align(128, 128)),),
)
