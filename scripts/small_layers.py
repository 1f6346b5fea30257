"""Small layers of every kind that moectl's kernels distinguish, for slow tools. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moectl.problem.moe_problem import Activation, Dims, MoEProblem
from moectl.problem.published_layers import MODELS
from moectl.problem.schemes import (
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    INT8_ACT_TOKEN,
    MXFP8,
    NVFP4,
    Scheme,
    int_format,
)

SMALL = {"dims": Dims(1408, 1152), "experts": 6, "local_experts": 6, "top_k": 2}
"""Several row tiles in both matrices, the last one partial for most tile sizes; more columns than any ring in
shared memory holds, so that ring stages are reused."""

RELU2 = Activation("relu2", gated=False)


def _like(model: str, **changes: object) -> MoEProblem:
    return replace(MODELS[model], **{**SMALL, **changes})


def _int(
    bits: int, group: int, scales: str = "BF16", *, zeros: bool = False, **changes: object
) -> MoEProblem:
    return _like("qwen3-30b", scheme=Scheme(int_format(bits, group, scales, zeros)), **changes)


LAYERS: Mapping[str, MoEProblem] = {
    "mxfp4": _like("gpt-oss-20b"),
    "nvfp4": _like("qwen3-30b", scheme=Scheme(NVFP4)),
    "nvfp4-fp16": _like("gpt-oss-20b", scheme=Scheme(NVFP4), dtype="fp16"),
    "mxfp8": _like("qwen3-30b", scheme=Scheme(MXFP8)),
    "mxfp8-fp16": _like("gpt-oss-20b", scheme=Scheme(MXFP8), dtype="fp16"),
    "int4-g32": _int(4, 32),
    "int4-g128": _int(4, 128),
    "mxfp4-fp16": _like("gpt-oss-20b", dtype="fp16"),
    "int4-g32-fp16": _int(4, 32, "F16", dtype="fp16"),
    "int4-channel": _int(4, FULL),
    "int4-g32-zeros": _int(4, 32, zeros=True),
    "int4-g128-zeros": _int(4, 128, zeros=True),
    "int4-g128-relu2": _int(4, 128, activation=RELU2, rows="concatenated"),
    "int8-g32": _int(8, 32),
    "int8-g128": _int(8, 128),
    "int8-channel": _int(8, FULL),
    "int8-channel-a8": _like("qwen3-30b", scheme=Scheme(int_format(8, FULL), INT8_ACT_TOKEN)),
    "int4-g128-a8": _like("qwen3-30b", scheme=Scheme(int_format(4, 128), INT8_ACT_TOKEN)),
    "int8-g128-zeros": _int(8, 128, zeros=True),
    "bf16": _like("qwen3-30b", scheme=Scheme(BF16)),
    "fp16": _like("gpt-oss-20b", scheme=Scheme(BF16), dtype="fp16"),
    "fp8-block": _like("qwen3-30b", scheme=Scheme(FP8_BLOCK, FP8_ACT_GROUP_128)),
    "fp8-block-fp16": _like("gpt-oss-20b", scheme=Scheme(FP8_BLOCK, FP8_ACT_GROUP_128), dtype="fp16"),
    "fp8-block-a16": _like("qwen3-30b", scheme=Scheme(FP8_BLOCK)),
    "fp8-channel": _like("qwen3-30b", scheme=Scheme(FP8_CHANNEL, FP8_ACT_TOKEN)),
    "fp8-channel-a16": _like("qwen3-30b", scheme=Scheme(FP8_CHANNEL)),
    "fp8-tensor-relu2": _like(
        "qwen3-30b", scheme=Scheme(FP8_TENSOR, FP8_ACT_TENSOR), activation=RELU2, rows="concatenated"
    ),
}
"""By format and scale groups, and by deviations from bf16 tokens and scales, a gate, and symmetric codes.
gpt-oss has biases, interleaved rows and a clamp, the others none of these."""
