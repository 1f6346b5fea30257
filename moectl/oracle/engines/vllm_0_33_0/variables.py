"""Environment variables of vLLM 0.33.0 that concern experts, and those that earlier releases had."""

from __future__ import annotations

from collections.abc import Mapping

from ....environment.variables import CASELESS, CHOICE, INTEGER, NUMBER, ONE, REMOVED, TEXT, WORD, Variable
from ...name_history import read_names
from .data import NAMES

PARTITION = "VLLM_PP_LAYER_PARTITION"
"""The number of layers of each pipeline stage, as a comma-separated list."""

_BY_NAME = "--moe-backend"
_FLASHINFER = "--moe-backend flashinfer_trtllm or flashinfer_cutlass"

_SELECTION = (
    Variable("VLLM_BATCH_INVARIANT", "only kernels whose results do not depend on the batch"),
    Variable("VLLM_USE_DEEP_GEMM", "enables DeepGEMM for dense layers and experts", default="1"),
    Variable("VLLM_MOE_USE_DEEP_GEMM", "enables DeepGEMM for experts", default="1"),
    Variable("VLLM_USE_FLASHINFER_MOE_INT4", "enables FlashInfer TRT-LLM for INT4 group 32 experts"),
    Variable("VLLM_HAS_FLASHINFER_CUBIN", "assumes that FlashInfer's kernels are installed"),
    Variable("VLLM_B12X_MOE_FP4_FORCE_A16", "FP4 experts of b12x use BF16 activations"),
    Variable("VLLM_ROCM_USE_AITER", "enables AITER; the other AITER variables need it", WORD, "False"),
    Variable("VLLM_ROCM_USE_AITER_MOE", "enables AITER for experts", WORD, "True"),
    Variable(
        "VLLM_ROCM_USE_AITER_MOE_SITUV2",
        "activation format of AITER's SiTU experts",
        CASELESS,
        "auto",
        ("auto", "a4w4", "a8w4", "a16w4", "0", "1"),
    ),
    Variable("VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", "FP4 activations for DeepSeek-V4 experts on AITER"),
    Variable(
        "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS",
        "AITER fuses shared and routed experts",
        WORD,
        "False",
    ),
    Variable("VLLM_CPU_INT4_W4A8", "INT4 experts on CPUs use INT8 activations", default="1"),
    Variable(
        "VLLM_HUMMING_MOE_GEMM_TYPE",
        "which of Humming's GEMMs runs; unset: grouped with expert parallelism, else indexed",
        TEXT,
        "auto",
        ("indexed", "grouped", "auto"),
    ),
    Variable("VLLM_HUMMING_INPUT_QUANT_CONFIG", "activation format of Humming: JSON or a file", TEXT, ""),
    Variable("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "quantizes weights for Humming: JSON or a file", TEXT, ""),
    Variable("VLLM_MARLIN_INPUT_DTYPE", "8-bit activations for Marlin", CHOICE, "", ("int8", "fp8")),
)

_KERNELS = (
    Variable("VLLM_TUNED_CONFIG_FOLDER", "directory of tuned Triton files, searched first", TEXT, ""),
    Variable(
        "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "emulated MXFP8 is dequantized once, at load", WORD, "True"
    ),
    Variable("VLLM_ROCM_MOE_PADDING", "pads expert weights on ROCm", default="1"),
    Variable("VLLM_ROCM_AITER_MOE_DISPATCH_POLICY", "how AITER sorts tokens: 0, 1 or 2", NUMBER),
    Variable("VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE", "dtype of Muse Spark's expert sum on ROCm", TEXT, "fp32"),
    Variable("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "quantizes Muse Spark's experts on ROCm", TEXT, ""),
    Variable("VLLM_HUMMING_USE_F16_ACCUM", "Humming accumulates in FP16"),
    Variable("VLLM_MARLIN_USE_ATOMIC_ADD", "Marlin's dense GEMMs reduce with atomic additions", ONE),
    Variable("VLLM_USE_DEEP_GEMM_E8M0", "with DeepGEMM scales of FP8 blocks are powers of two", default="1"),
    Variable("VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES", "DeepGEMM scales are aligned for TMA", default="1"),
    Variable(
        "VLLM_DEEP_GEMM_WARMUP",
        "which DeepGEMM kernels are compiled at start",
        CHOICE,
        "relax",
        ("skip", "full", "relax"),
    ),
    Variable("VLLM_USE_FUSED_MOE_GROUPED_TOPK", "one kernel for grouped top-k", default="1"),
    Variable("VLLM_MOE_SKIP_PADDING", "padding tokens of a batch go to no expert", default="1"),
    Variable("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "buffer of the CUTLASS FP4 experts", NUMBER, "163840"),
    Variable("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "replaces the router: outputs are wrong", TEXT, ""),
    Variable("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "where FlashInfer's measured tactics are kept", TEXT, ""),
    Variable("VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS", "FlashInfer operations that are not measured", TEXT, ""),
    Variable("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "runs shared experts in the main stream"),
    Variable(
        "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD",
        "maximum tokens for which shared experts run in a separate stream",
        NUMBER,
        "256",
    ),
    Variable(
        "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION", "runs DeepSeek-V4's shared experts separately"
    ),
    Variable("VLLM_STEP5_SHARD_SP_SHARED_EXPERT", "shards Step-5's shared experts"),
    Variable("VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT", "shards Kimi-K3's shared experts"),
)

_EXCHANGE = (
    Variable("VLLM_DEEPEPLL_NVFP4_DISPATCH", "DeepEP low latency carries NVFP4 tokens"),
    Variable("VLLM_DEEPEP_BUFFER_SIZE_MB", "size of DeepEP's buffers, MB", NUMBER, "1024"),
    Variable("VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE", "DeepEP uses intra-node kernels between nodes"),
    Variable("VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL", "DeepEP low latency over NVLink between nodes"),
    Variable("VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE", "DeepEP v2 may mix NVLink and RDMA", default="1"),
    Variable("VLLM_DEEPEP_V2_PREFER_OVERLAP", "DeepEP v2 uses fewer SMs"),
    Variable("VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION", "DeepEP v2 combines in lower precision"),
    Variable("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "FlashInfer's exchange combines in FP8"),
)

_STAGES = (
    Variable(PARTITION, "layers of each pipeline stage, such as 31,30; unset: equal shares", TEXT, ""),
)


NAME = "vLLM"
HISTORY = read_names(NAMES)
VERSION = "0.33.0"


def _removed(
    name: str,
    does: str,
    instead: str = "",
    kind: str = INTEGER,
    default: str = "0",
    choices: tuple[str, ...] = (),
) -> Variable:
    gone = HISTORY.variables.dropped(name, VERSION)
    dropped = f"{NAME} {gone}" if gone else ""
    return Variable(name, does, kind, default, choices, REMOVED, instead, dropped)


_REMOVED = (
    _removed(
        "VLLM_FLASHINFER_MOE_BACKEND",
        "which FlashInfer kernels run experts",
        "--moe-backend flashinfer_trtllm (it was latency), flashinfer_cutlass (throughput) or "
        "flashinfer_cutedsl (masked_gemm)",
        CHOICE,
        "latency",
        ("throughput", "latency", "masked_gemm"),
    ),
    _removed("VLLM_FUSED_MOE_UNQUANTIZED_BACKEND", "which kernels run BF16 experts", _BY_NAME),
    _removed("VLLM_USE_FLASHINFER_MOE_FP16", "FlashInfer for BF16 experts", _FLASHINFER),
    _removed("VLLM_USE_FLASHINFER_MOE_FP8", "FlashInfer for FP8 experts", _FLASHINFER),
    _removed(
        "VLLM_USE_FLASHINFER_MOE_FP4",
        "FlashInfer for NVFP4",
        _FLASHINFER + ", or flashinfer_cutedsl",
    ),
    _removed(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16", "FlashInfer for MXFP4 experts, BF16 activations", _FLASHINFER
    ),
    _removed(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
        "FlashInfer TRT-LLM for MXFP4 experts, MXFP8 activations",
        "--moe-backend flashinfer_trtllm",
    ),
    _removed(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
        "FlashInfer CUTLASS for MXFP4 experts, MXFP8 activations",
        "--moe-backend flashinfer_cutlass",
    ),
    _removed("VLLM_MXFP4_USE_MARLIN", "Marlin for MXFP4 experts", "--moe-backend marlin"),
    _removed(
        "VLLM_TEST_FORCE_FP8_MARLIN",
        "Marlin for FP8",
        "--moe-backend marlin for experts, --linear-backend marlin for dense layers",
    ),
    _removed("VLLM_NVFP4_GEMM_BACKEND", "which kernels run dense NVFP4 layers", "--linear-backend"),
    _removed("VLLM_USE_NVFP4_CT_EMULATIONS", "emulates NVFP4", "--moe-backend emulation"),
    _removed("VLLM_ALL2ALL_BACKEND", "which kernels exchange tokens", "--all2all-backend"),
    _removed("VLLM_FUSED_MOE_CHUNK_SIZE", "maximum tokens per call", "--max-num-batched-tokens"),
    _removed("VLLM_ENABLE_FUSED_MOE_ACTIVATION_CHUNKING", "splits calls", "--max-num-batched-tokens"),
    _removed("VLLM_MOE_DP_CHUNK_SIZE", "maximum tokens that a rank sends", "--max-num-batched-tokens"),
    _removed("VLLM_ENABLE_MOE_DP_CHUNK", "splits the tokens that a rank sends", "--max-num-batched-tokens"),
    _removed("VLLM_SKIP_DEEP_GEMM_WARMUP", "starts without DeepGEMM kernels", "VLLM_DEEP_GEMM_WARMUP=skip"),
    _removed("VLLM_ROCM_USE_AITER_2STAGE_MOE", "which AITER kernels run experts", "VLLM_ROCM_USE_AITER_MOE"),
    _removed("VLLM_ROCM_USE_AITER_FP8_BLOCK_SCALED_MOE", "AITER for block FP8", "VLLM_ROCM_USE_AITER_MOE"),
    _removed("VLLM_MOE_PADDING", "pads expert weights on ROCm", "VLLM_ROCM_MOE_PADDING"),
    _removed("VLLM_CPU_MOE_PREPACK", "repacks experts on a CPU"),
    _removed("VLLM_CPU_SGL_KERNEL", "which CPU kernels run small batches"),
)

VARIABLES: Mapping[str, Variable] = {
    variable.name: variable for variable in (*_SELECTION, *_KERNELS, *_EXCHANGE, *_STAGES, *_REMOVED)
}
"""By name: variables for backend selection, for kernels, for token exchange, for
pipeline stages, and removed ones."""
