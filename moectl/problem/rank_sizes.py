"""How many intermediate channels of each expert a tensor-parallel rank holds."""

from __future__ import annotations

import math

from ..errors import UsageError
from .moe_problem import MoEProblem
from .schemes import WeightFormat


def slice_unit(weight: WeightFormat) -> int:
    """Smallest number of intermediate channels that can be sliced off: whole bytes, groups and row blocks."""
    blocks = [size for size in weight.block if size > 0]
    return math.lcm(8 // weight.bits if weight.bits < 8 else 1, *blocks)


def slice_size(problem: MoEProblem, tp_size: int) -> int:
    """Number of intermediate channels that the first of `tp_size` ranks holds.

    MX formats (power-of-two block scales) are sliced like gpt-oss: every rank gets the blocks of a ceiling
    division, and the last one fewer. Other formats are cut into equal slices, as engines do.

    Raises UsageError if slices are not whole scale blocks, or a rank would hold nothing.
    """
    whole, weight = problem.dims.intermediate, problem.scheme.weight
    unit = slice_unit(weight)
    if tp_size == 1:
        return whole
    if weight.number.byte_scale == "E8M0":
        each = unit * math.ceil(math.ceil(whole / unit) / tp_size)
        if each * (tp_size - 1) >= whole:
            raise UsageError(
                f"intermediate size {whole} has {math.ceil(whole / unit)} blocks of {unit} weights, and "
                f"{each // unit} each for {tp_size} tensor-parallel ranks would leave the last with none.",
                hint="Choose a smaller --tp-size, or spread whole experts with --ep-size.",
            )
        return each
    if whole % tp_size or whole // tp_size % unit:
        share = f"{whole / tp_size:.10g}"
        raise UsageError(
            f"intermediate size {whole} over {tp_size} tensor-parallel ranks is {share} for each, which is "
            f"no whole number of blocks of {unit} weights, as {weight} needs.",
            hint="Choose a smaller --tp-size, or spread whole experts with --ep-size.",
        )
    return whole // tp_size
