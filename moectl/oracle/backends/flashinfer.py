"""FlashInfer's fused MoE kernels: TRT-LLM generated ones on SM10x, CUTLASS on SM90, SM10x and SM12x."""

from ...problem import Align
from ...schemes import ActFormat
from ..backend import (
    ALONE,
    SM10X,
    SM12X,
    SM90,
    Backend,
    Capability,
    Need,
    Offer,
    Rounding,
    Spread,
    Switch,
    Variant,
    only,
    sm,
)

MXFP8_ACT = ActFormat("mxfp8", 8, (1, 32))

KERNELS = Need("flashinfer_cubin", instead=("nvcc", "ninja"), switch="VLLM_HAS_FLASHINFER_CUBIN")
"""Compiled kernels, or the tools to compile them at run time."""

TRTLLM_SYMBOLS = (
    "fused_moe.trtllm_fp8_block_scale_moe",
    "fused_moe.trtllm_fp8_per_tensor_scale_moe",
    "fused_moe.trtllm_fp4_block_scale_moe",
    "fused_moe.trtllm_mxint4_block_scale_moe",
    "fused_moe.trtllm_bf16_moe",
)
CUTLASS_SYMBOLS = (
    "fused_moe.cutlass_fused_moe",
    "fp4_quantize",
    "nvfp4_block_scale_interleave",
    "fused_moe.trtllm_fp4_block_scale_moe",
)


def _needs(symbols: tuple[str, ...] = ("",)) -> tuple[Need, ...]:
    return (*(Need("flashinfer", symbol) for symbol in symbols), KERNELS)


_MXFP4 = frozenset({"mxfp4 group 32"})
_TRTLLM = Capability(
    arch=(SM10X,),
    needs=_needs(),
    offers=(Offer(_MXFP4, only("a16", "mxfp8")),),
    activations=only("silu", "swigluoai", "situ"),
    ungated=False,
)
_TRTLLM_MONOLITHIC = Capability(
    arch=_TRTLLM.arch,
    needs=_TRTLLM.needs,
    offers=_TRTLLM.offers,
    activations=_TRTLLM.activations,
    ungated=False,
    routing=only("DeepSeekV3", "Renormalize", "RenormalizeNaive"),
    spread=ALONE,
)
_TRTLLM_VARIANTS = (
    Variant("TrtLlmMxfp4ExpertsMonolithic", _TRTLLM_MONOLITHIC, monolithic=True),
    Variant("TrtLlmMxfp4ExpertsModular", _TRTLLM),
)
_TRTLLM_ROUNDING = (Rounding(Align(256, 128), weights=frozenset({"mxfp4"})),)

TRTLLM_BF16 = Backend(
    name="flashinfer_trtllm",
    engine_name="FLASHINFER_TRTLLM_MXFP4_BF16",
    variants=_TRTLLM_VARIANTS,
    rounding=_TRTLLM_ROUNDING,
    layout="trtllm-mxfp4",
)
TRTLLM_MXFP8 = Backend(
    name="flashinfer_trtllm_afp8",
    engine_name="FLASHINFER_TRTLLM_MXFP4_MXFP8",
    variants=_TRTLLM_VARIANTS,
    act=MXFP8_ACT,
    rounding=_TRTLLM_ROUNDING,
    layout="trtllm-mxfp4",
)

TRTLLM_INT4 = Backend(
    name="flashinfer_trtllm",
    engine_name="FLASHINFER_TRTLLM",
    variants=(
        Variant(
            "TrtLlmMxint4ExpertsMonolithic",
            Capability(
                arch=(SM10X,),
                needs=_needs(TRTLLM_SYMBOLS),
                switches=(Switch("VLLM_USE_FLASHINFER_MOE_INT4", default=False),),
                offers=(Offer(frozenset({"int4 group 32"})),),
                activations=only("silu", "swigluoai"),
                ungated=False,
                routing=only("Renormalize", "RenormalizeNaive", "DeepSeekV3", "Llama4"),
                spread=Spread(exchange=only("none", "allgather_reducescatter"), eplb=False),
                zero_points=False,
                bias=False,
                codes={"zero points": "zero_points_or_bias", "expert bias": "zero_points_or_bias"},
            ),
            monolithic=True,
        ),
    ),
    layout="trtllm-mxint4",
)

_CUTLASS = Capability(
    arch=(SM90, SM10X, SM12X),
    needs=_needs(CUTLASS_SYMBOLS),
    offers=(
        Offer(frozenset({"bf16"}), only("a16"), (sm(90),)),
        Offer(frozenset({"fp8 per tensor"}), only("fp8 per tensor static"), (sm(90),)),
        Offer(_MXFP4, only("a16"), (SM90,)),
        Offer(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic"), (SM90,)),
        Offer(_MXFP4, only("mxfp8"), (sm(100),)),
        Offer(frozenset({"nvfp4 group 16"}), only("nvfp4"), (sm(100),)),
    ),
    activations=only("silu", "gelu_tanh", "relu2_no_mul", "swigluoai", "swigluoai_uninterleave"),
)
_CUTLASS_ROUNDING = (Rounding(Align(128, 128), weights=frozenset({"mxfp4"})),)

CUTLASS_BF16 = Backend(
    name="flashinfer_cutlass",
    engine_name="FLASHINFER_CUTLASS_MXFP4_BF16",
    variants=(Variant("FlashInferExperts", _CUTLASS),),
    rounding=_CUTLASS_ROUNDING,
    layout="flashinfer-cutlass-sm90-mxfp4",
)
CUTLASS_MXFP8 = Backend(
    name="flashinfer_cutlass_afp8",
    engine_name="FLASHINFER_CUTLASS_MXFP4_MXFP8",
    variants=(Variant("FlashInferExperts", _CUTLASS),),
    act=MXFP8_ACT,
    rounding=_CUTLASS_ROUNDING,
    layout="flashinfer-cutlass-sm100-mxfp4",
)
