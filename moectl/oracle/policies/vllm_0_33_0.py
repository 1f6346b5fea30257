"""vLLM 0.33.0: which fused-MoE backend it chooses, as rows.

Covers MXFP4 and integer weights. Orders, conditions and sizes are those of the
release; `moectl.conformance` compares them with its recorded decisions.
"""

from __future__ import annotations

from dataclasses import replace

from ..backend import (
    SM12X,
    SM90,
    Arch,
    Backend,
    but,
    exact_key,
    group32_key,
    only,
    symmetric_group32_key,
    symmetric_group_key,
)
from ..backends import aiter, b12x, cpu, cutlass, deep_gemm, emulation, flashinfer, rdna3, triton, xpu
from ..backends.humming import HUMMING
from ..backends.marlin import BATCHED_MARLIN, MARLIN
from ..policy import (
    DECLARED_ACT,
    RANKED_ACT,
    Assignment,
    ExchangeSizes,
    Move,
    Order,
    Policy,
    Route,
)
from .vllm_terms import (
    AWQ_NEEDS_TURING,
    CHANNELS_WITH_MARLIN_ONLY,
    HALVES_GROUPS,
    MARLIN_REFUSES,
    REFUSES_ACT_ORDER,
    WHOLE_GROUPS,
    activation,
    dtype,
    routing,
)

_CPU, _XPU, _ROCM = (Arch("cpu"),), (Arch("xpu"),), (Arch("rocm"),)


_HUMMING_FIRST = Move(
    HUMMING, (SM90,), before=MARLIN, why="Humming goes before Marlin on compute capability 9.0 only"
)
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
_ON_REQUEST = (triton.TRITON_UNFUSED, b12x.B12X_MXFP8, b12x.B12X_BF16)

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
    moves=(_TRITON_LATE, _HUMMING_FIRST),
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
        Order((aiter.AITER_BF16, emulation.EMULATION_MX), _ROCM),
        Order((xpu.XPU_MXFP4,), _XPU),
        Order((cpu.CPU_MXFP4,), _CPU),
        Order(
            (flashinfer.TRTLLM_MXFP8, deep_gemm.DEEP_GEMM_MXFP4, MARLIN, BATCHED_MARLIN, HUMMING),
        ),
    ),
    moves=(_HUMMING_FIRST,),
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
        Assignment(xpu.XPU_MXFP4, xpu.XPU_MXFP4.variants[0], "XPU", _XPU),
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

_INTEGER_ORDERS = (
    Order((cpu.ZEN_INT4, cpu.CPU_INT4), _CPU),
    Order((xpu.XPU_INT4,), _XPU),
    Order(
        (
            rdna3.RDNA3,
            flashinfer.TRTLLM_INT4,
            MARLIN,
            BATCHED_MARLIN,
            triton.TRITON_INT,
            HUMMING,
            emulation.EMULATION_INT4,
        ),
    ),
)
_COMPRESSED_INT = Route(
    name="int4 and int8 weights of compressed-tensors",
    method="CompressedTensorsWNA16MoEMethod",
    storages=only("compressed-tensors"),
    weights=frozenset({"int4", "int8"}),
    acts=only("a16"),
    key=group32_key,
    may_have_bias=False,
    pads_tiles=True,
    orders=_INTEGER_ORDERS,
    moves=(_HUMMING_FIRST,),
    names={
        "triton": (triton.TRITON_INT,),
        "marlin": (MARLIN,),
        "humming": (HUMMING,),
        "flashinfer_trtllm": (flashinfer.TRTLLM_INT4,),
        "emulation": (emulation.EMULATION_INT4,),
        "rdna3": (rdna3.RDNA3,),
    },
    minimum=70,
    refusals=(REFUSES_ACT_ORDER,),
    aftermath=(CHANNELS_WITH_MARLIN_ONLY, WHOLE_GROUPS),
)
_GPTQ = replace(
    _COMPRESSED_INT,
    name="GPTQ",
    method="AutoGPTQMoEMethod",
    storages=only("gptq"),
    key=symmetric_group_key,
    may_have_bias=True,
    minimum=60,
    aftermath=(),
)
_AWQ = replace(
    _GPTQ,
    name="AWQ",
    method="AutoAWQMoEMethod",
    storages=only("awq"),
    weights=frozenset({"int4"}),
    minimum=75,
    refusals=(),
)
_MOE_WNA16 = replace(
    _COMPRESSED_INT,
    name="GPTQ and AWQ with sizes that Marlin does not take",
    method="MoeWNA16Method",
    storages=only("gptq", "awq"),
    when=MARLIN_REFUSES,
    key=symmetric_group32_key,
    may_have_bias=False,
    pads_tiles=False,
    checkpoint="moe_wna16",
    minimum=60,
    refusals=(REFUSES_ACT_ORDER, AWQ_NEEDS_TURING),
    aftermath=(HALVES_GROUPS,),
)
_QUARK_INT4 = replace(
    _COMPRESSED_INT,
    name="int4 weights of Quark",
    method="QuarkW4A16Int4MoEMethod",
    storages=only("quark"),
    weights=frozenset({"int4"}),
    pads_tiles=False,
    platforms=but("xpu"),
    refusals=(),
    aftermath=(HALVES_GROUPS,),
)
_INT8 = Route(
    name="int8 weights and activations",
    method="CompressedTensorsW8A8Int8MoEMethod",
    storages=only("compressed-tensors"),
    weights=frozenset({"int8"}),
    acts=only("int8 per token dynamic"),
    key=exact_key,
    act=DECLARED_ACT,
    orders=(Order((triton.TRITON_PLAIN, HUMMING, cpu.CPU_INT8)),),
    names={"triton": (triton.TRITON_PLAIN,), "humming": (HUMMING,)},
    minimum=70,
    refusals=(REFUSES_ACT_ORDER,),
)

_LOW_LATENCY = ExchangeSizes(sizes=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192))
_HIGH_THROUGHPUT = ExchangeSizes(multiple_bytes=512)

VLLM_0_33_0 = Policy(
    name="vllm-0.33.0",
    routes=(
        _GPT_OSS,
        _QUARK_MXFP4,
        _MXFP4,
        _COMPRESSED_MXFP4,
        _COMPRESSED_INT,
        _MOE_WNA16,
        _GPTQ,
        _AWQ,
        _QUARK_INT4,
        _INT8,
    ),
    platforms=frozenset({"cuda", "rocm", "cpu", "xpu"}),
    accepted_names=only(
        "auto",
        "triton",
        "batched_triton",
        "deep_gemm",
        "deep_gemm_mega_moe",
        "cutlass",
        "flashinfer_trtllm",
        "flashinfer_cutlass",
        "flashinfer_cutedsl",
        "flashinfer_moe_ep_cutedsl",
        "flashinfer_b12x",
        "b12x",
        "flashinfer_moe_ep_mega_deep_gemm",
        "marlin",
        "humming",
        "triton_unfused",
        "aiter",
        "aiter_mega_moe",
        "aiter_triton_mxfp4_bf16",
        "aiter_triton_mxfp4_mxfp4",
        "flydsl",
        "hpc",
        "emulation",
        "rdna3",
    ),
    exchanges=frozenset(
        {
            "allgather_reducescatter",
            "deepep_high_throughput",
            "deepep_low_latency",
            "deepep_v2",
            "flashinfer_all2allv",
            "flashinfer_nvlink_one_sided",
            "flashinfer_nvlink_two_sided",
            "moonep",
            "mori_high_throughput",
            "mori_low_latency",
            "nixl_ep",
        }
    ),
    dtype=dtype,
    activation=activation,
    routing=routing,
    retired=dict.fromkeys(
        (
            "VLLM_FLASHINFER_MOE_BACKEND",
            "VLLM_USE_FLASHINFER_MOE_FP16",
            "VLLM_USE_FLASHINFER_MOE_FP8",
            "VLLM_USE_FLASHINFER_MOE_FP4",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
            "VLLM_MXFP4_USE_MARLIN",
        ),
        "--moe-backend",
    )
    | {"VLLM_ALL2ALL_BACKEND": "--all2all-backend"},
    exchange_sizes={
        "deepep_high_throughput": _HIGH_THROUGHPUT,
        "deepep_v2": _HIGH_THROUGHPUT,
        "deepep_low_latency": _LOW_LATENCY,
        "nixl_ep": _LOW_LATENCY,
    },
)
