"""How many intermediate channels of each expert a tensor-parallel rank holds."""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import UsageError
from .layouts import OWN_LAYOUTS
from .moe_problem import Dims, MoEProblem
from .schemes import WeightFormat


def slice_unit(weight: WeightFormat) -> int:
    """Smallest number of intermediate channels that can be sliced off: whole bytes, groups and row blocks."""
    blocks = [size for size in weight.block if size > 0]
    return math.lcm(8 // weight.bits if weight.bits < 8 else 1, *blocks)


def slice_range(problem: MoEProblem, tp_size: int, rank: int) -> tuple[int, int]:
    """First and last intermediate channel (exclusive) of tensor-parallel rank `rank` of `tp_size`.

    Slices are whole scale blocks. Engines cut most formats into equal slices, and MX formats (power-of-two
    block scales) like gpt-oss: every rank gets the blocks of a ceiling division, and the last one fewer.
    Where that leaves no whole blocks, or none for the last rank, the first ranks get one block more than the
    others.

    Raises UsageError if there are fewer blocks than ranks.

    Example:
        >>> from moectl.problem.published_layers import model_problem
        >>> problem = model_problem("qwen3-30b", "fp8-block")
        >>> problem.dims.intermediate, [slice_range(problem, 4, rank) for rank in range(4)]
        (768, [(0, 256), (256, 512), (512, 640), (640, 768)])
    """
    whole, unit = problem.dims.intermediate, slice_unit(problem.scheme.weight)
    if equal := engine_slice(problem, tp_size):
        return rank * equal, min((rank + 1) * equal, whole)
    blocks = math.ceil(whole / unit)
    if blocks < tp_size:
        raise UsageError(
            f"intermediate size {whole} has {blocks} blocks of {unit} weights, fewer than {tp_size} "
            "tensor-parallel ranks.",
            hint="Choose a smaller --tp-size, or spread whole experts with --ep-size.",
        )
    each, more = divmod(blocks, tp_size)
    first = rank * each + min(rank, more)
    return unit * first, min(unit * (first + each + (rank < more)), whole)


def slice_size(problem: MoEProblem, tp_size: int) -> int:
    """Number of intermediate channels that the first of `tp_size` ranks holds: no rank has more."""
    first, last = slice_range(problem, tp_size, 0)
    return last - first


def engine_slice(problem: MoEProblem, tp_size: int) -> int:
    """Number of channels of all ranks but the last where engines slice a layer; 0 where they cannot."""
    whole, weight = problem.dims.intermediate, problem.scheme.weight
    unit = slice_unit(weight)
    if tp_size == 1:
        return whole
    if weight.number.byte_scale == "E8M0":
        each = unit * math.ceil(math.ceil(whole / unit) / tp_size)
        return each if each * (tp_size - 1) < whole else 0
    return 0 if whole % tp_size or whole // tp_size % unit else whole // tp_size


def check_slices(problem: MoEProblem, tp_size: int, layout: str) -> None:
    """Raises UsageError if `layout` is an engine's, whose kernels cannot take such slices of a layer."""
    if layout in OWN_LAYOUTS or engine_slice(problem, tp_size):
        return
    whole, weight = problem.dims.intermediate, problem.scheme.weight
    raise UsageError(
        f"engines cut intermediate size {whole} for {tp_size} tensor-parallel ranks into slices that do not "
        f"give each rank whole blocks of {slice_unit(weight)} weights, as {weight} needs.",
        hint="Choose another --tp-size, spread whole experts with --ep-size, or choose --to moectl, whose "
        "ranks may hold unequal slices.",
    )


def as_sliced(share: MoEProblem) -> MoEProblem:
    """`share`, as of `MoEProblem.on`, with the channels that the first of its ranks holds.

    Raises like `slice_size`.

    Example:
        >>> from moectl.problem.moe_problem import Parallel
        >>> from moectl.problem.published_layers import model_problem
        >>> as_sliced(model_problem("gpt-oss-120b").on(Parallel(tp=4))).dims.intermediate
        736
    """
    ranks, dims = share.parallel.tp_size, share.dims
    whole = replace(share, dims=Dims(dims.hidden, dims.intermediate * ranks))
    return replace(share, dims=Dims(dims.hidden, slice_size(whole, ranks)))
