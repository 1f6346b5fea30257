"""gpt-oss: MXFP4 experts fused over all experts, gate and up rows interleaved, with biases.

Blocks of 32 codes are an axis of their own (``[experts, rows, columns / 32, 16]``); their bytes follow
each other, so that the canonical row is the same memory.
"""

from __future__ import annotations

from ...checkpoint.model import LayerGroup
from .part import Part
from .source import Source


def _parts(group: LayerGroup) -> tuple[Part, ...]:
    roles = ("w13", "w13_scale", "w2", "w2_scale")
    biases = ("w13_bias", "w2_bias") if group.problem.bias else ()
    return tuple(Part(role, role) for role in (*roles, *biases))


GPT_OSS = Source("gpt_oss", _parts)
