"""Which change of format is taken: exact ones first, then quantizing, then what must be asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import UsageError
from ...schemes import WeightFormat
from ..quantize import Quantizer
from .changes import Change, Decoded, Kept, Mxfp4ToNvfp4, Quantized, Widened, refines

FLOATING = frozenset(("bf16", "fp8", "mxfp8"))
"""Formats of enough values to quantize from."""


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Attributes:
        target: the format of the output, as weights are quantized to it.
        dtype: safetensors dtype of the model's 16-bit weights and scales.
        method, rule: as `Quantizer`.
        requantize: weights that have been quantized before may lose more.
    """

    target: WeightFormat
    dtype: str = "BF16"
    method: str = "search"
    rule: str = "floor"
    requantize: bool = False


@dataclass(frozen=True)
class Rule:
    """One way from a source format to a wished one.

    Attributes:
        holds: whether it applies, for matrices of these sizes ``(n, k)``.
        target: the format that comes out.
        change: what is done to tensors.
    """

    holds: Callable[[WeightFormat, Wish, tuple[tuple[int, int], ...]], bool]
    target: Callable[[WeightFormat, Wish], WeightFormat]
    change: Callable[[WeightFormat, WeightFormat, Wish], Change]


def _same(source: WeightFormat, wish: Wish, sizes: tuple[tuple[int, int], ...]) -> bool:
    wanted = wish.target
    return source.name == wanted.name and all(refines(source, wanted, n, k) for n, k in sizes)


def _kept_target(source: WeightFormat, wish: Wish) -> WeightFormat:
    # Powers of two as F32 are the same numbers, and read by more engines.
    scale = "F32" if source.name == "fp8" and source.scale_dtype in ("E8M0", "F8_E8M0", "U8") else ""
    return replace(source, block=wish.target.block, scale_dtype=scale or source.scale_dtype)


def _fresh(source: WeightFormat, wish: Wish) -> WeightFormat:
    target = wish.target
    return replace(target, scale_dtype=wish.dtype) if target.name.startswith("int") else target


RULES: tuple[Rule, ...] = (
    Rule(_same, _kept_target, lambda source, target, wish: Kept(source, target)),
    # An integer grid of 8 bits takes any blocks.
    Rule(
        lambda source, wish, sizes: source.name == wish.target.name == "int8",
        lambda source, wish: source,
        lambda source, target, wish: Kept(source, target),
    ),
    Rule(
        lambda source, wish, sizes: (source.name, wish.target.name) == ("int4", "int8"),
        lambda source, wish: replace(source, name="int8", bits=8),
        lambda source, target, wish: Widened(source),
    ),
    Rule(
        lambda source, wish, sizes: (source.name, wish.target.name) == ("mxfp4", "nvfp4"),
        lambda source, wish: wish.target,
        lambda source, target, wish: Mxfp4ToNvfp4(wish.requantize),
    ),
    Rule(
        lambda source, wish, sizes: wish.target.name == "bf16",
        lambda source, wish: wish.target,
        lambda source, target, wish: Decoded(source, wish.dtype, wish.requantize or source.name in FLOATING),
    ),
    Rule(
        lambda source, wish, sizes: source.name in FLOATING or wish.requantize,
        _fresh,
        lambda source, target, wish: Quantized(source, Quantizer(target, wish.method, wish.rule)),
    ),
)
"""The first that holds is taken."""


def change_for(
    source: WeightFormat, wish: Wish, sizes: tuple[tuple[int, int], ...]
) -> tuple[WeightFormat, Change]:
    """The format that comes out for matrices of `sizes` ``(n, k)`` in `source`, and how.

    Raises UsageError when weights that have been quantized before would lose more, unasked.
    """
    for rule in RULES:
        if rule.holds(source, wish, sizes):
            target = rule.target(source, wish)
            return target, rule.change(source, target, wish)
    raise UsageError(
        f"weights that are {source} have no exact form in {wish.target}.",
        reason="Quantizing again what has been quantized loses more.",
        hint="Convert from the original weights, or give --requantize.",
    )
