"""What the kernels of other projects support, except FlashInfer's (see `flashinfer`)."""

from __future__ import annotations

from ..problem.schemes import (
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    INT8_ACT_TOKEN,
    MXFP4,
    MXFP8,
    NVFP4,
    int_format,
)
from .kernel_support import KernelSupport, WeightSupport, integers
from .own_kernels import GATED, UNGATED

_BF16 = ("bf16",)

MARLIN = KernelSupport(
    (
        WeightSupport(integers(4), "marlin-int4"),
        WeightSupport(integers(8, (False,)), "marlin-int8"),
        WeightSupport((MXFP4,), "marlin-mxfp4", _BF16),
        WeightSupport((NVFP4,), "marlin-nvfp4", _BF16, any_act=True, own_scales=True),
        WeightSupport((MXFP8,), "marlin-mxfp8", _BF16, any_act=True),
        WeightSupport(
            (FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK), "marlin-fp8", _BF16, any_act=True, own_scales=True
        ),
    ),
    gated=GATED,
    ungated=UNGATED,
)
"""vLLM's Marlin operator for MoE layers."""

HUMMING = KernelSupport(
    (
        WeightSupport(integers(4), "humming-int4"),
        WeightSupport(integers(8), "humming-int8"),
        WeightSupport((MXFP4,), "humming-mxfp4", _BF16),
        WeightSupport((NVFP4,), "humming-nvfp4", _BF16, any_act=True, own_scales=True),
        WeightSupport((MXFP8,), "humming-mxfp8", _BF16, any_act=True),
        WeightSupport((FP8_BLOCK, FP8_CHANNEL), "humming-fp8", _BF16, own_scales=True),
        *(
            WeightSupport(
                (weight,),
                "humming-fp8-act-fp8",
                _BF16,
                own_scales=True,
                acts=(act,),
                lowest=(9, 0),
            )
            for weight, act in ((FP8_BLOCK, FP8_ACT_GROUP_128), (FP8_CHANNEL, FP8_ACT_TOKEN))
        ),
        *(
            WeightSupport(
                weights,
                acts=(INT8_ACT_TOKEN,),
                lowest=(9, 0),
                untried=untried,
            )
            for weights, untried in (
                ((int_format(8, FULL), int_format(4, 128)), False),
                ((int_format(4, 32), int_format(4, FULL)), True),
            )
        ),
    ),
    gated=GATED,
    ungated=UNGATED,
    multiple=32,
    weight_on_input=False,
)
"""Humming's GEMMs; packed words and zero points require sizes divisible by 32."""

TRITON_KERNELS = KernelSupport(
    (WeightSupport((MXFP4,), "triton-hopper", _BF16),),
    lowest=(9, 0),
    highest=(9, 0),
    gated=GATED,
    weight_on_input=False,
)
"""``matmul_ogs`` of OpenAI's triton_kernels with the Hopper layout, which requires gated experts."""

_FP8 = (8, 9)
"""The first compute capability with products of FP8 numbers."""

VLLM_TRITON = KernelSupport(
    (
        WeightSupport((BF16,), "plain-bf16"),
        WeightSupport((FP8_BLOCK,), "plain-fp8", acts=(FP8_ACT_GROUP_128,), own_scales=True, lowest=_FP8),
        WeightSupport((FP8_CHANNEL,), "plain-fp8", acts=(FP8_ACT_TOKEN,), own_scales=True, lowest=_FP8),
        WeightSupport(
            (FP8_TENSOR,),
            "plain-fp8-halves",
            acts=(FP8_ACT_TENSOR_STATIC, FP8_ACT_TENSOR, FP8_ACT_TOKEN),
            own_scales=True,
            lowest=_FP8,
        ),
    ),
    gated=GATED,
    ungated=UNGATED,
)
"""``fused_moe_kernel`` of vLLM's Triton experts."""

VLLM_CUTLASS = KernelSupport(
    (
        WeightSupport((FP8_CHANNEL,), "plain-fp8", acts=(FP8_ACT_TOKEN,), own_scales=True),
        WeightSupport(
            (FP8_TENSOR,), "plain-fp8-halves", acts=(FP8_ACT_TENSOR_STATIC, FP8_ACT_TENSOR), own_scales=True
        ),
    ),
    lowest=(9, 0),
    highest=(9, 0),
    gated=GATED,
    multiple=16,
    weight_on_input=False,
)
"""``cutlass_moe_mm`` of vLLM's library: rows of 16 bytes, and two halves before the activation."""

TORCH_GROUPED = KernelSupport(
    (
        WeightSupport((BF16,), "plain-bf16", _BF16),
        WeightSupport((FP8_CHANNEL,), "plain-fp8", _BF16, own_scales=True, acts=(FP8_ACT_TOKEN,)),
    ),
    lowest=(9, 0),
    highest=(9, 0),
    gated=GATED,
    ungated=UNGATED,
    multiple=16,
    weight_on_input=False,
)
"""torch's grouped products, with rows of multiples of 16 bytes; on other GPUs a call waits for the GPU."""

SONIC_MOE = KernelSupport(
    (WeightSupport((BF16,), "plain-bf16", _BF16, untried=True),),
    lowest=(9, 0),
    highest=(9, 0),
    gated=("silu",),
    ungated=(),
    multiple=16,
    weight_on_input=False,
)
"""SonicMoE's functions as moectl calls them, on SM90."""

DEEP_GEMM = KernelSupport(
    (
        WeightSupport((BF16,), "plain-bf16", _BF16),
        WeightSupport((FP8_BLOCK,), "plain-fp8", _BF16, own_scales=True, acts=(FP8_ACT_GROUP_128,)),
    ),
    lowest=(9, 0),
    highest=(9, 0),
    gated=GATED,
    ungated=UNGATED,
    multiple=128,
    weight_on_input=False,
)
"""DeepGEMM's grouped GEMMs as moectl calls them, on SM90: newer GPUs take other scales."""
