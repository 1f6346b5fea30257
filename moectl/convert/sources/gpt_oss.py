"""gpt-oss: MXFP4 experts fused over all experts, gate and up rows interleaved, with biases.

Blocks of 32 codes are an axis of their own (``[experts, rows, columns / 32, 16]``); their bytes follow
each other, so that the canonical row is the same memory.
"""

from __future__ import annotations

from .source import Part, Source

GPT_OSS = Source(
    "gpt_oss",
    tuple(Part(role, role) for role in ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")),
)
