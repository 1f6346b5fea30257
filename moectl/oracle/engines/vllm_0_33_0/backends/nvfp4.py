"""NVFP4 kernels of FlashInfer and vLLM: TRT-LLM and CuteDSL on SM10x, CUTLASS from there on."""

from dataclasses import replace

from .....problem.schemes import NVFP4_ACT
from ....backend import (
    Backend,
    Capability,
    ExpertsClass,
    FormatSupport,
    ParallelSupport,
    WeightForm,
    but,
    only,
)
from ....gpu_archs import SM10X, SM12X, sm
from .defaults import SHARED
from .flashinfer import CUTLASS_CAPABILITY, SITU_KERNELS, TRTLLM_SYMBOLS, flashinfer_needs
from .triton import PLAIN_CAPABILITY

WEIGHTS = frozenset({"nvfp4 group 16"})
_W4A4 = (FormatSupport(WEIGHTS, only("nvfp4")),)

_TRTLLM = Capability(
    arch=(SM10X,),
    needs=flashinfer_needs(TRTLLM_SYMBOLS),
    formats=_W4A4,
    activations=only("silu", "relu2_no_mul", "gelu", "gelu_tanh", "swigluoai_uninterleave", "situ"),
    rules=(SITU_KERNELS,),
)
TRTLLM_NVFP4 = Backend(
    name="flashinfer_trtllm",
    engine_name="FLASHINFER_TRTLLM",
    variants=(
        ExpertsClass(
            "TrtLlmNvFp4ExpertsMonolithic",
            replace(
                _TRTLLM,
                routing=only(
                    "DeepSeekV3",
                    "Renormalize",
                    "RenormalizeNaive",
                    "Llama4",
                    "SigmoidRenorm",
                    "Sigmoid",
                    "MiniMax2",
                ),
                logits=only("bf16", "fp32"),
                parallel=ParallelSupport(exchange=only("none"), eplb=False),
            ),
            monolithic=True,
        ),
        ExpertsClass("TrtLlmNvFp4ExpertsModular", _TRTLLM),
    ),
    act=NVFP4_ACT,
    # Weights are padded to the layout's tiles only when they are repacked, here as in all of these.
    forms=(WeightForm("trtllm-nvfp4"),),
)

CUTEDSL = Backend(
    name="flashinfer_cutedsl",
    engine_name="FLASHINFER_CUTEDSL",
    variants=(
        ExpertsClass(
            "FlashInferCuteDSLExperts",
            Capability(
                arch=(SM10X,),
                needs=flashinfer_needs(("cute_dsl_fused_moe_nvfp4",)),
                formats=_W4A4,
                activations=only("silu", "swigluoai", "swigluoai_uninterleave", "relu2_no_mul", "situ"),
            ),
        ),
    ),
    act=NVFP4_ACT,
    forms=(WeightForm("cutedsl-nvfp4"),),
)
CUTEDSL_BATCHED = Backend(
    name="flashinfer_cutedsl_batched",
    engine_name="FLASHINFER_CUTEDSL_BATCHED",
    variants=(
        ExpertsClass(
            "FlashInferCuteDSLBatchedExperts",
            Capability(
                arch=(SM10X,),
                needs=flashinfer_needs(
                    (
                        "cute_dsl.blockscaled_gemm.grouped_gemm_nt_masked",
                        "scaled_fp4_grouped_quantize",
                        "silu_and_mul_scaled_nvfp4_experts_quantize",
                    )
                ),
                formats=_W4A4,
                activations=only("silu"),
                ungated=False,
            ),
            batched=True,
        ),
    ),
    act=NVFP4_ACT,
    forms=(WeightForm("cutedsl-batched-nvfp4"),),
)
FLASHINFER_B12X = Backend(
    name="flashinfer_b12x",
    engine_name="FLASHINFER_B12X",
    variants=(
        ExpertsClass(
            "FlashInferB12xExperts",
            Capability(
                arch=(SM12X,),
                needs=flashinfer_needs(
                    ("fused_moe.b12x_fused_moe", "cute_dsl.utils.convert_sf_to_mma_layout")
                ),
                formats=(FormatSupport(WEIGHTS, only("nvfp4", "a16")),),
                activations=only("silu", "gelu_tanh", "relu2_no_mul"),
                parallel=ParallelSupport(ep=False),
            ),
        ),
    ),
    act=NVFP4_ACT,
    forms=(WeightForm("flashinfer-cutlass-nvfp4"),),
    note="the engine keeps it out of its own order until an operation of SM121 is unguarded upstream",
)
FLASHINFER_CUTLASS_NVFP4 = Backend(
    name="flashinfer_cutlass",
    engine_name="FLASHINFER_CUTLASS",
    variants=(ExpertsClass("FlashInferExperts", CUTLASS_CAPABILITY),),
    act=NVFP4_ACT,
    forms=(WeightForm("flashinfer-cutlass-nvfp4"),),
)
CUTLASS_NVFP4 = Backend(
    name="cutlass",
    engine_name="VLLM_CUTLASS",
    variants=(
        ExpertsClass(
            "CutlassExpertsFp4",
            Capability(
                arch=(sm(100, 129),),
                formats=_W4A4,
                activations=SHARED,
                invariant=True,
                parallel=ParallelSupport(
                    exchange=but(
                        "flashinfer_nvlink_two_sided",
                        "flashinfer_all2allv",
                        "flashinfer_nvlink_one_sided",
                        "deepep_high_throughput",
                    )
                ),
            ),
        ),
    ),
    act=NVFP4_ACT,
    forms=(WeightForm("cutlass-nvfp4"),),
)
EMULATION_NVFP4 = Backend(
    name="emulation",
    engine_name="EMULATION",
    variants=(
        ExpertsClass(
            "Nvfp4QuantizationEmulationTritonExperts",
            replace(PLAIN_CAPABILITY, formats=_W4A4, bias=False, lora=False),
        ),
    ),
    act=NVFP4_ACT,
    forms=(WeightForm("plain"),),
)
