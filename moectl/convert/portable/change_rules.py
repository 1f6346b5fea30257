"""Rules that select a format change: exact ones first, then quantization, then requantization if allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import UsageError
from ...problem.schemes import WeightFormat
from .format_changes import (
    Decoded,
    FormatChange,
    Mxfp4ToNvfp4,
    Requantized,
    SameFormat,
    WidenedIntegers,
    refines,
)
from .options import PortableOptions


@dataclass(frozen=True)
class ChangeRule:
    """A change from some source formats to some requested ones.

    Attributes:
        applies: whether the rule applies, to matrices of these sizes ``(n, k)``.
        target: the resulting format, in a model of this dtype.
        change: the change of the tensors, in a model of this dtype.
    """

    applies: Callable[[WeightFormat, PortableOptions, tuple[tuple[int, int], ...]], bool]
    target: Callable[[WeightFormat, PortableOptions, str], WeightFormat]
    change: Callable[[WeightFormat, WeightFormat, PortableOptions, str], FormatChange]


def _same(source: WeightFormat, options: PortableOptions, sizes: tuple[tuple[int, int], ...]) -> bool:
    target = options.format.weight
    return source.name == target.name and all(refines(source, target, n, k) for n, k in sizes)


def _same_format_target(source: WeightFormat, options: PortableOptions, dtype: str) -> WeightFormat:
    # F32 holds powers of two exactly, and more engines read it.
    scale = "F32" if source.name == "fp8" and source.scale_dtype in ("E8M0", "F8_E8M0", "U8") else ""
    return replace(source, block=options.format.weight.block, scale_dtype=scale or source.scale_dtype)


def _is_wide(source: WeightFormat) -> bool:
    """True for formats precise enough to quantize from: floats of 8 bits and more."""
    return source.bits >= 8 and not source.number.grid.integer


def _quantized_target(source: WeightFormat, options: PortableOptions, dtype: str) -> WeightFormat:
    target = options.format.weight
    return replace(target, scale_dtype=dtype) if target.number.grid.integer else target


RULES: tuple[ChangeRule, ...] = (
    ChangeRule(_same, _same_format_target, lambda source, target, options, dtype: SameFormat(source, target)),
    # 8-bit integers keep any block size.
    ChangeRule(
        lambda source, options, sizes: source.name == options.format.weight.name == "int8",
        lambda source, options, dtype: source,
        lambda source, target, options, dtype: SameFormat(source, target),
    ),
    ChangeRule(
        lambda source, options, sizes: (source.name, options.format.weight.name) == ("int4", "int8"),
        lambda source, options, dtype: replace(source, name="int8", bits=8),
        lambda source, target, options, dtype: WidenedIntegers(source),
    ),
    ChangeRule(
        lambda source, options, sizes: (source.name, options.format.weight.name) == ("mxfp4", "nvfp4"),
        lambda source, options, dtype: options.format.weight,
        lambda source, target, options, dtype: Mxfp4ToNvfp4(options.requantize),
    ),
    ChangeRule(
        lambda source, options, sizes: options.format.weight.name == "bf16",
        lambda source, options, dtype: options.format.weight,
        lambda source, target, options, dtype: Decoded(source, dtype, options.requantize or _is_wide(source)),
    ),
    ChangeRule(
        lambda source, options, sizes: _is_wide(source) or options.requantize,
        _quantized_target,
        lambda source, target, options, dtype: Requantized(source, replace(options.quantizer, weight=target)),
    ),
)
"""The first rule that applies is used."""


def change_for(
    source: WeightFormat, options: PortableOptions, sizes: tuple[tuple[int, int], ...], dtype: str = "BF16"
) -> tuple[WeightFormat, FormatChange]:
    """The resulting format for matrices of `sizes` ``(n, k)`` in the format `source`, and the change to it.

    `dtype` is the safetensors dtype of the model's 16-bit weights and scales.

    Raises UsageError if quantized weights would be requantized without permission.
    """
    for rule in RULES:
        if rule.applies(source, options, sizes):
            target = rule.target(source, options, dtype)
            return target, rule.change(source, target, options, dtype)
    raise UsageError(
        f"weights in {source} cannot be represented exactly in {options.format.weight}.",
        reason="Requantizing quantized weights adds to their error.",
        hint="Convert from the original weights, or give --requantize.",
    )
