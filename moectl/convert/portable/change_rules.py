"""Which change of format is taken: exact ones first, then quantizing, then what must be asked for."""

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
    """One way from a source format to the one asked for.

    Attributes:
        holds: whether it applies, for matrices of these sizes ``(n, k)``.
        target: the format that comes out, in a model of this dtype.
        change: what is done to tensors of a model of this dtype.
    """

    holds: Callable[[WeightFormat, PortableOptions, tuple[tuple[int, int], ...]], bool]
    target: Callable[[WeightFormat, PortableOptions, str], WeightFormat]
    change: Callable[[WeightFormat, WeightFormat, PortableOptions, str], FormatChange]


def _same(source: WeightFormat, options: PortableOptions, sizes: tuple[tuple[int, int], ...]) -> bool:
    wanted = options.format.weight
    return source.name == wanted.name and all(refines(source, wanted, n, k) for n, k in sizes)


def _kept_target(source: WeightFormat, options: PortableOptions, dtype: str) -> WeightFormat:
    # Powers of two as F32 are the same numbers, and read by more engines.
    scale = "F32" if source.name == "fp8" and source.scale_dtype in ("E8M0", "F8_E8M0", "U8") else ""
    return replace(source, block=options.format.weight.block, scale_dtype=scale or source.scale_dtype)


def _is_wide(source: WeightFormat) -> bool:
    """True for formats of enough values to quantize from: floats of 8 bits and more."""
    return source.bits >= 8 and not source.number.grid.integer


def _fresh(source: WeightFormat, options: PortableOptions, dtype: str) -> WeightFormat:
    target = options.format.weight
    return replace(target, scale_dtype=dtype) if target.number.grid.integer else target


RULES: tuple[ChangeRule, ...] = (
    ChangeRule(_same, _kept_target, lambda source, target, options, dtype: SameFormat(source, target)),
    # An integer grid of 8 bits takes any blocks.
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
        _fresh,
        lambda source, target, options, dtype: Requantized(source, replace(options.quantizer, weight=target)),
    ),
)
"""The first that holds is taken."""


def change_for(
    source: WeightFormat, options: PortableOptions, sizes: tuple[tuple[int, int], ...], dtype: str = "BF16"
) -> tuple[WeightFormat, FormatChange]:
    """The format that comes out for matrices of `sizes` ``(n, k)`` in `source`, and how.

    `dtype` is the safetensors dtype of the model's 16-bit weights and scales.

    Raises UsageError when weights that have been quantized before would lose more, unasked.
    """
    for rule in RULES:
        if rule.holds(source, options, sizes):
            target = rule.target(source, options, dtype)
            return target, rule.change(source, target, options, dtype)
    raise UsageError(
        f"weights that are {source} have no exact form in {options.format.weight}.",
        reason="Quantizing again what has been quantized loses more.",
        hint="Convert from the original weights, or give --requantize.",
    )
