"""MXFP4: the routes of gpt-oss, Quark and compressed-tensors checkpoints."""

from dataclasses import replace

from ....backend import Backend, but, only
from ....gpu_archs import SM12X
from ....route import RANKED_ACT, Assignment, Order, OrderMove, Route
from ..backends import aiter, b12x, cpu, cutlass, deep_gemm, emulation, flashinfer, moe_ep, triton, xpu
from ..backends.humming import HUMMING
from ..backends.marlin import BATCHED_MARLIN, MARLIN
from .order import HUMMING_FIRST, XPU
from .terms import REFUSES_ACT_ORDER, refuses

_TRITON_LATE = OrderMove(
    triton.TRITON_MXFP4,
    (SM12X,),
    after=BATCHED_MARLIN,
    why="Marlin has priority over Triton on SM12x, whose small shared memory makes Marlin prefill faster",
)
TWINS = ((MARLIN, BATCHED_MARLIN),)

NAMES: dict[str, tuple[Backend, ...]] = {
    "b12x": (b12x.B12X_MXFP8, b12x.B12X_BF16),
    "deep_gemm": (deep_gemm.DEEP_GEMM_MXFP4,),
    "flashinfer_trtllm": (flashinfer.TRTLLM_BF16, flashinfer.TRTLLM_MXFP8),
    "flashinfer_trtllm_afp8": (flashinfer.TRTLLM_MXFP8,),
    "flashinfer_cutlass": (flashinfer.CUTLASS_BF16, flashinfer.CUTLASS_MXFP8),
    "flashinfer_cutlass_afp8": (flashinfer.CUTLASS_MXFP8,),
    "flashinfer_moe_ep_cutedsl": (moe_ep.MOE_EP_CUTEDSL,),
    "flashinfer_moe_ep_mega_deep_gemm": (moe_ep.MOE_EP_DEEP_GEMM,),
    "triton": (triton.TRITON_MXFP4,),
    "triton_unfused": (triton.TRITON_UNFUSED,),
    "humming": (HUMMING,),
    "marlin": (MARLIN,),
    "aiter": (
        aiter.AITER_BF16,
        aiter.AITER_TRITON_BF16,
        aiter.AITER_FP8,
        aiter.AITER_MXFP4,
        aiter.AITER_TRITON_MXFP4,
    ),
    "aiter_triton_mxfp4_bf16": (aiter.AITER_TRITON_BF16,),
    "aiter_mxfp4_fp8": (aiter.AITER_FP8,),
    "aiter_triton_mxfp4_mxfp4": (aiter.AITER_TRITON_MXFP4,),
    "aiter_mxfp4_mxfp4": (aiter.AITER_MXFP4,),
    "xpu": (xpu.XPU_MXFP4,),
    "cpu": (cpu.CPU_MXFP4,),
    "emulation": (emulation.EMULATION_MX,),
}
ADAPTER_NAMES: dict[str, tuple[Backend, ...]] = {
    "flashinfer_trtllm": (flashinfer.TRTLLM_LORA,),
    # LoRA adapters are not supported with MXFP8 activations.
    "flashinfer_trtllm_afp8": (),
}
ON_REQUEST = (
    triton.TRITON_UNFUSED,
    b12x.B12X_MXFP8,
    b12x.B12X_BF16,
    moe_ep.MOE_EP_CUTEDSL,
    moe_ep.MOE_EP_DEEP_GEMM,
)

_GPT_OSS = Route(
    name="MXFP4 of gpt-oss",
    method="GptOssMxfp4MoEMethod",
    storages=only("gpt_oss"),
    weights=frozenset({"mxfp4"}),
    act=RANKED_ACT,
    act_overrides={"mxfp8": "mxfp8", "mxfp4": "mxfp4"},
    orders=(
        Order(
            (
                flashinfer.TRTLLM_BF16,
                flashinfer.TRTLLM_MXFP8,
                aiter.AITER_BF16,
                aiter.AITER_TRITON_BF16,
                aiter.AITER_FP8,
                aiter.AITER_MXFP4,
                triton.TRITON_MXFP4,
                flashinfer.CUTLASS_BF16,
                flashinfer.CUTLASS_MXFP8,
                cutlass.CUTLASS_MXFP4,
                MARLIN,
                BATCHED_MARLIN,
                HUMMING,
                xpu.XPU_MXFP4,
                cpu.CPU_MXFP4,
                emulation.EMULATION_MX,
            )
        ),
    ),
    moves=(_TRITON_LATE, HUMMING_FIRST),
    on_request=ON_REQUEST,
    names=NAMES,
    adapter_names=ADAPTER_NAMES,
    unfiltered=frozenset({"b12x"}),
    batched_twins=TWINS,
    rounds=True,
    rounds_by_activation=False,
    minimum=80,
    dtypes=only("bf16"),
)
_QUARK_MXFP4 = replace(
    _GPT_OSS,
    name="MXFP4 of Quark",
    method="QuarkOCP_MX_MoEMethod",
    storages=only("quark"),
    acts=only("a16", "mxfp4", "fp8 per tensor static"),
    act_overrides={},
    platforms=but("xpu"),
    minimum=70,
    dtypes=only("bf16", "fp16"),
)
_COMPRESSED_MXFP4 = Route(
    name="MXFP4 of compressed-tensors",
    method="CompressedTensorsW4A4Mxfp4MoEMethod",
    storages=only("compressed-tensors"),
    weights=frozenset({"mxfp4"}),
    assigned=(
        # The method reports Marlin as its backend even when it uses the CUTLASS class.
        Assignment(
            cutlass.CUTLASS_MXFP4,
            cutlass.CUTLASS_MXFP4.variants[0],
            "MARLIN",
            cutlass.CUTLASS_MXFP4.variants[0].capability.arch,
        ),
        Assignment(xpu.XPU_MXFP4, xpu.XPU_MXFP4.variants[0], "XPU", XPU),
        Assignment(MARLIN, MARLIN.variants[0], "MARLIN"),
    ),
    request_routes=dict.fromkeys(
        ("b12x", "flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm"),
        replace(
            _GPT_OSS,
            name="MXFP4 of compressed-tensors, asked for by name",
            method="CompressedTensorsW4A4Mxfp4MoEMethod",
            act="own",
            act_overrides={},
            rounds=False,
        ),
    ),
    minimum=70,
    refusals=(REFUSES_ACT_ORDER,),
)

_QUARK_DYNAMIC = replace(
    _QUARK_MXFP4,
    name="MXFP4 of Quark with FP8 activations scaled at run time",
    acts=only("fp8 per tensor dynamic"),
    refusals=(
        refuses(
            "dynamic FP8 activations",
            "QuarkOCP_MX_MoEMethod does not support dynamic FP8 activation scales; use static scales",
            "NotImplementedError",
        ),
    ),
)
_QUARK_OTHERS = replace(
    _QUARK_MXFP4,
    name="MXFP4 of Quark with other activations",
    acts=but(),
    refusals=(
        refuses(
            "activation format",
            "Quark's MXFP4 experts support 16-bit, MXFP4 or static FP8 activations; "
            "export the checkpoint with one of these",
            "RuntimeError",
        ),
    ),
)
_MODELOPT = replace(
    _GPT_OSS,
    name="MXFP4 of ModelOpt",
    method="ModelOptMixedPrecisionConfig",
    storages=only("modelopt"),
    refusals=(
        refuses(
            "ModelOpt algorithm",
            "ModelOpt's algorithms do not include MXFP4; use NVFP4, or MXFP4 from another tool",
            "ValueError",
        ),
    ),
)

ROUTES = (_GPT_OSS, _QUARK_MXFP4, _QUARK_DYNAMIC, _QUARK_OTHERS, _COMPRESSED_MXFP4, _MODELOPT)
