"""Size requirements of every weight layout: multiples that it pads to, and multiples that it requires.

A rule pads `hidden` and the per-rank `intermediate` with zeros. Padding inside a layout's tiles, which no
kernel sees as a size, is not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import UsageError
from .moe_problem import Align, MoEProblem
from .schemes import FULL, WeightFormat

_NONE = Align()


@dataclass(frozen=True, slots=True)
class SizeRule:
    """The layout pads sizes to multiples of `align`, and requires multiples of `needs`.

    `ungated` is the rule for experts without a gate, if it differs; `odd_hidden` the rule for hidden sizes
    that are not a multiple of 128.
    """

    align: Align = _NONE
    needs: Align = _NONE
    ungated: SizeRule | None = None
    odd_hidden: SizeRule | None = None

    def of(self, gated: bool, hidden: int) -> SizeRule:
        """The rule for gated or ungated experts with this hidden size."""
        if self.odd_hidden and hidden % 128:
            return self.odd_hidden
        return self if gated or self.ungated is None else self.ungated


def _marlin(hidden: int) -> Callable[[WeightFormat], SizeRule]:
    """Whole 64-wide tiles of whole groups; `hidden` is not padded and must be a multiple."""

    def rule(weight: WeightFormat) -> SizeRule:
        group = max(weight.group, 1)
        return SizeRule(Align(1, math.lcm(64, group)), needs=Align(math.lcm(hidden, group), 1))

    return rule


def _mtile64(weight: WeightFormat) -> SizeRule:
    """Tiles of 64 rows by 64 columns, and whole groups along the columns."""
    columns = math.lcm(64, max(weight.group, 1))
    return SizeRule(Align(columns, columns))


def _humming_int(weight: WeightFormat) -> SizeRule:
    """Whole words of codes; one zero point for a row leaves no way to add columns of zero weight."""
    return SizeRule(needs=Align(128, 128) if weight.zero_point and weight.group == FULL else Align(8, 8))


def _humming_fp8(weight: WeightFormat) -> SizeRule:
    """Whole blocks of scales."""
    return SizeRule(needs=Align(128, 128) if weight.block[0] > 1 else Align(4, 4))


def _aiter_fp8(weight: WeightFormat) -> SizeRule:
    """Tiles of 16 rows by 32 columns, and whole blocks of scales."""
    return SizeRule(needs=Align(128, 128) if weight.block[0] > 1 else Align(32, 32))


def _cpu_int4(weight: WeightFormat) -> SizeRule:
    """Blocks of 32 rows by whole groups, or 128 columns of longer ones; gate and up have their own."""
    columns = math.lcm(32, weight.group if weight.group > 0 else 128)
    return SizeRule(needs=Align(columns, columns))


_WIDE = SizeRule(Align(256, 128))
_WIDE_NVFP4 = SizeRule(Align(256, 64), ungated=_WIDE)
_WIDE_NVFP4_PER_TOKEN = SizeRule(Align(256, 64), ungated=SizeRule(Align(512, 128)))
"""FlashInfer's rule for activations with a global scale per token."""
_SWIZZLED_NVFP4 = SizeRule(needs=Align(1, 64), ungated=SizeRule(Align(1, 128)))
"""Gate and up together must be whole tiles of 128 rows; only ungated experts are padded."""
_MXFP4_128 = SizeRule(Align(128, 128))
_HUMMING_MXFP4 = SizeRule(Align(1, 64))
"""What vLLM rounds up for it; the rest is added inside the layout."""
_HUMMING_GROUPS = SizeRule()
_CPU_BF16 = SizeRule(Align(1, 32), needs=Align(32, 1))
_MARLIN_FP8 = _marlin(64)
_MARLIN_INT = _marlin(128)

RULES: Mapping[str, SizeRule | Callable[[WeightFormat], SizeRule]] = {
    "marlin-int4": _MARLIN_INT,
    "marlin-int4-act-int8": _MARLIN_INT,
    "marlin-int4-act-fp8": _MARLIN_INT,
    "marlin-int8": _MARLIN_INT,
    "marlin-int8-act-int8": _MARLIN_INT,
    "marlin-mxfp4": _WIDE,
    "marlin-mxfp4-act-fp8": _WIDE,
    "marlin-nvfp4": SizeRule(
        Align(1, 64), needs=Align(64, 1), odd_hidden=SizeRule(Align(1, 128), needs=Align(64, 1))
    ),
    "marlin-fp8": _MARLIN_FP8,
    "marlin-mxfp8": _MARLIN_FP8,
    "trtllm-mxfp4": _WIDE,
    "trtllm-mxint4": SizeRule(needs=Align(256, 256)),
    "trtllm-nvfp4": _WIDE_NVFP4,
    "trtllm-nvfp4-act-nvfp4-per-token": _WIDE_NVFP4_PER_TOKEN,
    "trtllm-fp8-tensor": SizeRule(
        Align(1, 16), needs=Align(32, 1), ungated=SizeRule(Align(1, 128), needs=Align(32, 1))
    ),
    "trtllm-fp8-block": SizeRule(needs=Align(128, 128)),
    "trtllm-mxfp8": _WIDE,
    "trtllm-bf16": SizeRule(Align(1, 128), needs=Align(64, 1)),
    "triton-hopper": SizeRule(Align(1, 64)),
    "triton-blackwell": SizeRule(Align(1, 64)),
    "cutlass-sm90": _MXFP4_128,
    "cutlass-sm100": _MXFP4_128,
    "cutlass-mxfp4": _MXFP4_128,
    "flashinfer-cutlass-nvfp4": _SWIZZLED_NVFP4,
    "cutlass-nvfp4": _SWIZZLED_NVFP4,
    "cutedsl-batched-nvfp4": _SWIZZLED_NVFP4,
    "cutedsl-nvfp4": _WIDE_NVFP4,
    "b12x-nvfp4": SizeRule(Align(1, 64), ungated=SizeRule(Align(1, 128))),
    "b12x-mxfp4": SizeRule(),
    "cutlass-fp8-tensor": SizeRule(Align(1, 16), ungated=SizeRule(Align(1, 128))),
    "cutlass-fp8-block": SizeRule(),
    "cutlass-bf16": SizeRule(),
    "humming-int4": _humming_int,
    "humming-int4-act-fp8": _humming_int,
    "humming-int4-act-fp8-sm90": _humming_int,
    "humming-int4-e0m3": _humming_int,
    "humming-int4-e0m3-act-fp8": _humming_int,
    "humming-int4-e0m3-act-fp8-sm90": _humming_int,
    "humming-int8": _humming_int,
    "humming-int8-e0m7": _humming_int,
    "humming-mxfp4": _HUMMING_MXFP4,
    "humming-mxfp4-sm100": _HUMMING_MXFP4,
    "humming-mxfp4-act-fp8": SizeRule(needs=Align(256, 128), ungated=SizeRule(needs=Align(256, 256))),
    "humming-mxfp4-act-mxfp8-sm100": _HUMMING_MXFP4,
    "humming-mxfp4-act-mxfp8-sm120": _HUMMING_MXFP4,
    "humming-nvfp4": _HUMMING_GROUPS,
    "humming-nvfp4-rows": _HUMMING_GROUPS,
    "humming-nvfp4-sm100": _HUMMING_GROUPS,
    "humming-mxfp8": _HUMMING_GROUPS,
    "humming-mxfp8-sm100": _HUMMING_GROUPS,
    "humming-fp8": _humming_fp8,
    "humming-fp8-act-fp8": SizeRule(needs=Align(256, 128), ungated=SizeRule(needs=Align(256, 256))),
    "humming-fp8-sm100": _humming_fp8,
    "aiter-bf16": SizeRule(needs=Align(32, 128)),
    "aiter-fp8": _aiter_fp8,
    "aiter-mxfp4": SizeRule(Align(256, 256)),
    "aiter-mxfp4-act-mxfp4": SizeRule(Align(256, 128)),
    "aiter-mxfp8": SizeRule(needs=Align(256, 64)),
    "plain-bf16": SizeRule(),
    "plain-fp8": SizeRule(),
    "plain-fp8-halves": SizeRule(),
    "triton-wna16": SizeRule(),
    "cpu-bf16": _CPU_BF16,
    "cpu-bf16-vec": _CPU_BF16,
    "cpu-amx-fp8": SizeRule(needs=Align(128, 128)),
    "cpu-amx-mxfp4": SizeRule(Align(32, 32)),
    "cpu-amx-int4": _cpu_int4,
    "moectl-mtile64": _mtile64,
    "moectl-bf16": SizeRule(),
    "moectl-fp8": SizeRule(),
    "moectl-int4": SizeRule(),
    "moectl-int8": SizeRule(),
}
"""Size rules by layout name."""


def size_rule(layout: str, weight: WeightFormat, gated: bool = True, hidden: int = 0) -> SizeRule:
    """The rule of `layout` for a weight format and kind of experts; UsageError for an unknown layout."""
    rule = RULES.get(layout)
    if rule is None:
        raise UsageError(f"no weight layout is called {layout!r}; known are {', '.join(RULES)}.")
    return (rule if isinstance(rule, SizeRule) else rule(weight)).of(gated, hidden)


def padding(layout: str, weight: WeightFormat, gated: bool = True, hidden: int = 0) -> Align:
    """The multiples to which `layout` rounds sizes up for `weight`; UsageError for an unknown layout."""
    return size_rule(layout, weight, gated, hidden).align


def pad(layout: str, problem: MoEProblem) -> MoEProblem:
    """`problem` with the padded sizes of `layout`; UsageError for an unknown layout.

    Example:
        >>> from moectl.problem.published_layers import MODELS
        >>> dims = pad("trtllm-mxfp4", MODELS["gpt-oss-20b"]).dims
        >>> dims.padded_hidden, dims.padded_intermediate
        (3072, 2944)
    """
    align = padding(layout, problem.scheme.weight, problem.activation.gated, problem.dims.hidden)
    return replace(problem, dims=align.apply(problem.dims))
