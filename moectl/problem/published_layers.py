"""Expert layers that kernels are tuned for, by name.

`moectl.checkpoint.source.named_layers` has those of all built-in models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import UsageError
from .moe_problem import SILU, SWIGLU_OAI, Dims, MoEProblem
from .schemes import (
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    INT8_ACT_TOKEN,
    MXFP4,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    NVFP4_ACT,
    Scheme,
    int_format,
)

SCHEMES: Mapping[str, Scheme] = {
    "mxfp4": Scheme(MXFP4),
    "int4-g32": Scheme(int_format(4, 32)),
    "int4-g128": Scheme(int_format(4, 128)),
    "int8-g128": Scheme(int_format(8, 128)),
    "int8-channel": Scheme(int_format(8, FULL)),
    "bf16": Scheme(BF16),
    "fp8-block": Scheme(FP8_BLOCK, FP8_ACT_GROUP_128),
    "fp8-channel": Scheme(FP8_CHANNEL, FP8_ACT_TOKEN),
    "fp8-tensor": Scheme(FP8_TENSOR, FP8_ACT_TENSOR),
    "fp8-block-a16": Scheme(FP8_BLOCK),
    "fp8-channel-a16": Scheme(FP8_CHANNEL),
    "int8-channel-a8": Scheme(int_format(8, FULL), INT8_ACT_TOKEN),
    "int4-g128-a8": Scheme(int_format(4, 128), INT8_ACT_TOKEN),
    "mxfp8": Scheme(MXFP8, MXFP8_ACT),
    "nvfp4": Scheme(NVFP4, NVFP4_ACT),
}
"""Formats of weights and activations by the names that ``NAME:FORMAT`` takes; ``-a16`` are FP8 weights with
16-bit activations, ``-a8`` integer weights with INT8 activations."""


def _gpt_oss(experts: int) -> MoEProblem:
    dims = Dims(2880, 2880)
    return MoEProblem(dims, experts, 4, Scheme(MXFP4), SWIGLU_OAI, rows="interleaved", bias=True)


def _plain(hidden: int, intermediate: int, experts: int, top_k: int, weight: str) -> MoEProblem:
    return MoEProblem(Dims(hidden, intermediate), experts, top_k, SCHEMES[weight], SILU)


MODELS: Mapping[str, MoEProblem] = {
    "gpt-oss-120b": _gpt_oss(128),
    "gpt-oss-20b": _gpt_oss(32),
    "kimi-k2": _plain(7168, 2048, 384, 8, "int4-g32"),
    "qwen3-30b": _plain(2048, 768, 128, 8, "int4-g128"),
    "deepseek-v3": _plain(7168, 2048, 256, 8, "int4-g128"),
    "qwen3-235b": _plain(4096, 1536, 128, 8, "bf16"),
    "qwen3.5-35b": _plain(2048, 512, 256, 8, "bf16"),
    "mixtral-8x7b": _plain(4096, 14336, 8, 2, "bf16"),
}
"""Expert layers of published models, each with its default format for benchmarks."""


def default_format(model: str) -> str:
    """The key in `SCHEMES` of a model's default format."""
    return next(name for name, scheme in SCHEMES.items() if scheme == MODELS[model].scheme)


def named_problem(text: str) -> tuple[str, MoEProblem]:
    """The model's name and layer for ``NAME`` or ``NAME:FORMAT``; UsageError for unknown names."""
    name, colon, format = text.partition(":")
    return name, model_problem(name, format if colon else None)


def model_problem(model: str, format: str | None = None, experts: int | None = None) -> MoEProblem:
    """The layer of `model`, optionally in another of `SCHEMES` or with fewer experts.

    Raises UsageError for unknown names.

    Example:
        >>> problem = model_problem("qwen3-30b", "mxfp4")
        >>> problem.experts, str(problem.scheme.weight)
        (128, 'mxfp4 group 32')
    """
    for name, table, what in ((model, MODELS, "model"), (format, SCHEMES, "format")):
        if name is not None and name not in table:
            raise UsageError(f"no {what} is called {name!r}; there are {', '.join(table)}")
    problem = MODELS[model]
    if format is not None:
        problem = replace(problem, scheme=SCHEMES[format])
    return replace(problem, experts=experts, local_experts=experts) if experts else problem
