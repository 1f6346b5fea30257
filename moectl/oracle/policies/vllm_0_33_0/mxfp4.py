"""MXFP4: the routes of gpt-oss, Quark, native and compressed-tensors checkpoints."""

from dataclasses import replace

from ...backend import SM12X, Backend, but, only
from ...backends import aiter, b12x, cpu, cutlass, deep_gemm, emulation, flashinfer, moe_ep, triton, xpu
from ...backends.humming import HUMMING
from ...backends.marlin import BATCHED_MARLIN, MARLIN
from ...route import RANKED_ACT, Assignment, Move, Order, Route
from .order import CPU, HUMMING_FIRST, ROCM, XPU
from .terms import REFUSES_ACT_ORDER

_TRITON_LATE = Move(
    triton.TRITON_MXFP4,
    (SM12X,),
    after=BATCHED_MARLIN,
    why="Triton goes after Marlin on SM12x, whose small shared memory makes Marlin prefill faster",
)
_TWINS = ((MARLIN, BATCHED_MARLIN),)

_MXFP4_NAMES: dict[str, tuple[Backend, ...]] = {
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
_ON_REQUEST = (
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
    on_request=_ON_REQUEST,
    names=_MXFP4_NAMES,
    unfiltered=frozenset({"b12x"}),
    twins=_TWINS,
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
    platforms=but("xpu"),
    minimum=70,
    dtypes=only("bf16", "fp16"),
)
_MXFP4 = Route(
    name="native MXFP4",
    method="Mxfp4MoEMethod",
    storages=only("mxfp4"),
    weights=frozenset({"mxfp4"}),
    orders=(
        Order((aiter.AITER_BF16, emulation.EMULATION_MX), ROCM),
        Order((xpu.XPU_MXFP4,), XPU),
        Order((cpu.CPU_MXFP4,), CPU),
        Order(
            (flashinfer.TRTLLM_MXFP8, deep_gemm.DEEP_GEMM_MXFP4, MARLIN, BATCHED_MARLIN, HUMMING),
        ),
    ),
    moves=(HUMMING_FIRST,),
    on_request=_ON_REQUEST,
    names=_MXFP4_NAMES,
    twins=_TWINS,
    rounds=True,
    minimum=80,
    dtypes=only("bf16"),
)
_COMPRESSED_MXFP4 = Route(
    name="MXFP4 of compressed-tensors",
    method="CompressedTensorsW4A4Mxfp4MoEMethod",
    storages=only("compressed-tensors"),
    weights=frozenset({"mxfp4"}),
    acts=only("a16", "mxfp4", "mxfp8"),
    assigned=(
        # The method names Marlin as its backend even where it takes the CUTLASS class.
        Assignment(
            cutlass.CUTLASS_MXFP4,
            cutlass.CUTLASS_MXFP4.variants[0],
            "MARLIN",
            cutlass.CUTLASS_MXFP4.variants[0].offers.arch,
        ),
        Assignment(xpu.XPU_MXFP4, xpu.XPU_MXFP4.variants[0], "XPU", XPU),
        Assignment(MARLIN, MARLIN.variants[0], "MARLIN"),
    ),
    detours={
        "b12x": replace(
            _GPT_OSS,
            name="MXFP4 of compressed-tensors, b12x asked for",
            method="CompressedTensorsW4A4Mxfp4MoEMethod",
            act="own",
            rounds=False,
        )
    },
    minimum=70,
    refusals=(REFUSES_ACT_ORDER,),
)

ROUTES = (_GPT_OSS, _QUARK_MXFP4, _MXFP4, _COMPRESSED_MXFP4)
