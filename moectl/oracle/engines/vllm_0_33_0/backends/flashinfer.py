"""FlashInfer's fused MoE kernels: TRT-LLM generated ones on SM10x, CUTLASS on SM90, SM10x and SM12x."""

from .....problem.padding import padding
from .....problem.schemes import MXFP4, MXFP8_ACT
from ....backend import (
    ALONE,
    Backend,
    BackendRule,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    ParallelSupport,
    WeightForm,
    only,
)
from ....gpu_archs import SM10X, SM12X, SM90, sm
from ..variables import VARIABLES

KERNELS = PackageNeed(
    "flashinfer_cubin", instead=("nvcc", "ninja"), switch=VARIABLES["VLLM_HAS_FLASHINFER_CUBIN"]
)
"""Precompiled kernels, or the tools to compile them at run time."""

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


def flashinfer_needs(symbols: tuple[str, ...] = ("",)) -> tuple[PackageNeed, ...]:
    """FlashInfer with `symbols`, and kernels precompiled or compilable."""
    return (*(PackageNeed("flashinfer", symbol) for symbol in symbols), KERNELS)


SITU = "tllm_enums.Situ"
SITU_KERNELS = BackendRule(
    question="SiTU in FlashInfer",
    group="package",
    code="activation",
    holds=lambda ask: ask.activation != "situ" or ask.packages.has("flashinfer", SITU),
    wanted=lambda ask: ask.activation,
    offered=f"situ with flashinfer.{SITU} only",
)

_MXFP4 = frozenset({"mxfp4 group 32"})
_TRTLLM = Capability(
    arch=(SM10X,),
    needs=flashinfer_needs(),
    formats=(FormatSupport(_MXFP4, only("a16", "mxfp8")),),
    activations=only("silu", "swigluoai", "situ"),
    ungated=False,
    rules=(SITU_KERNELS,),
)
_TRTLLM_MONOLITHIC = Capability(
    arch=_TRTLLM.arch,
    needs=_TRTLLM.needs,
    formats=_TRTLLM.formats,
    activations=_TRTLLM.activations,
    ungated=False,
    routing=only("DeepSeekV3", "Renormalize", "RenormalizeNaive"),
    parallel=ALONE,
    rules=_TRTLLM.rules,
)
_TRTLLM_VARIANTS = (
    ExpertsClass("TrtLlmMxfp4ExpertsMonolithic", _TRTLLM_MONOLITHIC, monolithic=True),
    ExpertsClass("TrtLlmMxfp4ExpertsModular", _TRTLLM),
)
_TRTLLM_FORMS = (WeightForm("trtllm-mxfp4", padding("trtllm-mxfp4", MXFP4)),)

TRTLLM_BF16 = Backend(
    name="flashinfer_trtllm",
    engine_name="FLASHINFER_TRTLLM_MXFP4_BF16",
    variants=_TRTLLM_VARIANTS,
    forms=_TRTLLM_FORMS,
)
TRTLLM_MXFP8 = Backend(
    name="flashinfer_trtllm_afp8",
    engine_name="FLASHINFER_TRTLLM_MXFP4_MXFP8",
    variants=_TRTLLM_VARIANTS,
    act=MXFP8_ACT,
    forms=_TRTLLM_FORMS,
)

TRTLLM_LORA = Backend(
    name="flashinfer_trtllm",
    engine_name="FLASHINFER_TRTLLM_MXFP4_BF16",
    variants=(
        ExpertsClass(
            "TrtLlmMxfp4LoRAExperts",
            Capability(
                arch=(SM10X,),
                needs=flashinfer_needs(TRTLLM_SYMBOLS),
                formats=(FormatSupport(_MXFP4),),
                activations=only("silu", "swigluoai"),
                ungated=False,
                parallel=ALONE,
                lora=True,
            ),
        ),
        *_TRTLLM_VARIANTS,
    ),
    forms=_TRTLLM_FORMS,
    note="Adapters between the two GEMMs, only when asked for by name.",
)

TRTLLM_INT4 = Backend(
    name="flashinfer_trtllm",
    engine_name="FLASHINFER_TRTLLM",
    variants=(
        ExpertsClass(
            "TrtLlmMxint4ExpertsMonolithic",
            Capability(
                arch=(SM10X,),
                needs=flashinfer_needs(TRTLLM_SYMBOLS),
                switches=(EnvironmentSwitch(VARIABLES["VLLM_USE_FLASHINFER_MOE_INT4"]),),
                formats=(FormatSupport(frozenset({"int4 group 32"})),),
                activations=only("silu", "swigluoai"),
                ungated=False,
                routing=only("Renormalize", "RenormalizeNaive", "DeepSeekV3", "Llama4"),
                parallel=ParallelSupport(exchange=only("none", "allgather_reducescatter"), eplb=False),
                zero_points=False,
                bias=False,
                rules=(
                    BackendRule(
                        question="router dtype of this method",
                        group="scheme",
                        code="other",
                        holds=lambda ask: ask.logits != "fp32" or ask.routing == "DeepSeekV3",
                        wanted=lambda ask: f"{ask.logits} with {ask.routing}",
                        offered="fp32 with DeepSeekV3 only",
                    ),
                ),
                codes={"zero points": "zero_points_or_bias", "expert bias": "zero_points_or_bias"},
            ),
            monolithic=True,
        ),
    ),
    forms=(WeightForm("trtllm-mxint4"),),
)

CUTLASS_CAPABILITY = Capability(
    arch=(SM90, SM10X, SM12X),
    needs=flashinfer_needs(CUTLASS_SYMBOLS),
    formats=(
        FormatSupport(frozenset({"bf16"}), only("a16"), (sm(90),)),
        FormatSupport(frozenset({"fp8 per tensor"}), only("fp8 per tensor static"), (sm(90),)),
        FormatSupport(_MXFP4, only("a16"), (SM90,)),
        FormatSupport(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic"), (SM90,)),
        FormatSupport(_MXFP4, only("mxfp8"), (sm(100),)),
        FormatSupport(frozenset({"nvfp4 group 16"}), only("nvfp4"), (sm(100),)),
    ),
    activations=only("silu", "gelu_tanh", "relu2_no_mul", "swigluoai", "swigluoai_uninterleave"),
)

CUTLASS_BF16 = Backend(
    name="flashinfer_cutlass",
    engine_name="FLASHINFER_CUTLASS_MXFP4_BF16",
    variants=(ExpertsClass("FlashInferExperts", CUTLASS_CAPABILITY),),
    forms=(WeightForm("cutlass-sm90", padding("cutlass-sm90", MXFP4)),),
)
CUTLASS_MXFP8 = Backend(
    name="flashinfer_cutlass_afp8",
    engine_name="FLASHINFER_CUTLASS_MXFP4_MXFP8",
    variants=(ExpertsClass("FlashInferExperts", CUTLASS_CAPABILITY),),
    act=MXFP8_ACT,
    forms=(WeightForm("cutlass-sm100", padding("cutlass-sm100", MXFP4)),),
)
CUTLASS_PLAIN = Backend(
    name="flashinfer_cutlass",
    engine_name="FlashInfer CUTLASS",
    variants=(ExpertsClass("FlashInferExperts", CUTLASS_CAPABILITY),),
    forms=(WeightForm("cutlass-bf16"),),
)
CUTLASS_FP8 = Backend(
    name="flashinfer_cutlass",
    engine_name="FLASHINFER_CUTLASS",
    variants=(ExpertsClass("FlashInferExperts", CUTLASS_CAPABILITY),),
    # Sizes are padded when the weights are repacked.
    forms=(
        WeightForm("cutlass-fp8-block", scaled=only("fp8 block 128x128")),
        WeightForm("cutlass-fp8-tensor"),
    ),
)
