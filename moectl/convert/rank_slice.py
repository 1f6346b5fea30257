"""One rank's share of a layer: whole experts of a range, and of each a slice cut by scale blocks.

Order of operations: slice, pad each half, convert. A slice is cut from canonical tensors, so that what
follows (padding, value steps, layouts) sees the same as for a checkpoint that holds the slice alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import UsageError
from ..files.tensor_table import TensorType
from ..problem.moe_problem import Dims, MoEProblem, expert_range
from ..problem.schemes import FULL, WeightFormat
from .canonical import INTERLEAVED, groups, halves, scale_rows
from .steps.value_steps import Shapes, Tensors
from .stream.source_reader import as_bytes

Place = tuple[int, int, int, int]
"""An axis, how many matrices are stacked along it, and the first and last element (exclusive) of each."""

LARGEST_WORLD = 1 << 16
"""Most ranks that a layer may be shared by."""


@dataclass(frozen=True)
class RankShard:
    """One rank among those that share every layer.

    Experts are spread over `ep_size` ranks, and each expert is sliced over `tp_size`; ranks that
    slice the same experts are neighbours.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.ep_size

    @property
    def rank(self) -> int:
        """This one's number among all."""
        return self.ep_rank * self.tp_size + self.tp_rank

    @property
    def possible(self) -> bool:
        """True when sizes and ranks fit each other; a manifest may hold anything."""
        sizes = (self.tp_size, self.ep_size)
        held = zip((self.tp_rank, self.ep_rank), sizes, strict=True)
        return all(0 <= rank < size <= LARGEST_WORLD for rank, size in held)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks} (tp {self.tp_size}, ep {self.ep_size})"


def shard_of(rank: int, tp_size: int = 1, ep_size: int = 1) -> RankShard:
    """The `RankShard` of a rank's number; UsageError when there is no such rank."""
    for name, size in (("--tp-size", tp_size), ("--ep-size", ep_size)):
        if not 1 <= size <= LARGEST_WORLD:
            raise UsageError(f"{name} must be 1 to {LARGEST_WORLD}, got {size}.")
    if not 0 <= rank < tp_size * ep_size:
        raise UsageError(
            f"there is no rank {rank} among {tp_size * ep_size} (--tp-size {tp_size}, --ep-size {ep_size}).",
            hint=f"Ranks are 0 to {tp_size * ep_size - 1}.",
        )
    return RankShard(tp_size, rank % tp_size, ep_size, rank // tp_size)


def slice_unit(weight: WeightFormat) -> int:
    """Lanes of the intermediate size that stay together: whole bytes, groups and blocks of rows."""
    blocks = [size for size in weight.block if size > 0]
    return math.lcm(8 // weight.bits if weight.bits < 8 else 1, *blocks)


def slice_size(problem: MoEProblem, tp_size: int) -> int:
    """Lanes of `problem`'s intermediate size that the first of `tp_size` ranks holds.

    Blocks with scales that are powers of two (MX formats) are dealt out as gpt-oss is: as many to each rank
    as the first needs, and fewer to the last. Others are cut into equal slices, as engines cut them.

    Raises UsageError when they are no whole scale blocks, or a rank would hold nothing.
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


@dataclass(frozen=True)
class RankShare:
    """What `shard` holds of a layer of `whole`, a problem with all experts and logical sizes."""

    whole: MoEProblem
    shard: RankShard = RankShard()

    @property
    def sliced(self) -> bool:
        """True when experts are not whole."""
        return self.shard.tp_size > 1

    @cached_property
    def experts(self) -> tuple[int, int]:
        """First and last expert (exclusive); UsageError when there are more ranks than experts."""
        if self.shard.ep_size > self.whole.experts:
            raise UsageError(
                f"{self.whole.experts} experts cannot be spread over {self.shard.ep_size} ranks.",
                hint="Choose --ep-size at most the number of experts.",
            )
        return expert_range(self.whole.experts, self.shard.ep_size, self.shard.ep_rank)

    @cached_property
    def intermediate(self) -> tuple[int, int]:
        """First and last lane (exclusive) of each expert's intermediate size; errors as `slice_size`."""
        each = slice_size(self.whole, self.shard.tp_size)
        first = self.shard.tp_rank * each
        return first, min(first + each, self.whole.dims.intermediate)

    @property
    def problem(self) -> MoEProblem:
        """The rank's problem with logical sizes; all its ids and its router are the whole layer's."""
        (first, last), (low, high) = self.experts, self.intermediate
        return replace(self.whole, dims=Dims(self.whole.dims.hidden, high - low), local_experts=last - first)

    def padded(self, pad: Callable[[MoEProblem], MoEProblem]) -> MoEProblem:
        """The rank's problem, with the sizes to which `pad` pads the rank that holds most."""
        problem, most = self.problem, slice_size(self.whole, self.shard.tp_size)
        full = pad(replace(problem, dims=Dims(problem.dims.hidden, most))).dims
        return replace(problem, dims=replace(full, intermediate=problem.dims.intermediate))

    @property
    def partial(self) -> str:
        """What the rank's output is, in a sentence; empty when it has everything."""
        if self.shard.ranks == 1:
            return ""
        (first, last), (low, high) = self.experts, self.intermediate
        return (
            f"{self.shard} has experts {first} to {last - 1} of {self.whole.experts} and lanes {low} to "
            f"{high - 1} of {self.whole.dims.intermediate}: its output is a partial sum, and the sum over "
            "all ranks is the layer's"
        )

    def shapes(self, whole: Shapes) -> Shapes:
        """Canonical shapes of the rank's slices, of whole experts' shapes."""
        made = {}
        for role, (dtype, shape) in whole.items():
            place = self._place(role, self.intermediate)
            made[role] = TensorType(dtype, shape if place is None else _resized(shape, place))
        return made

    def cut(self, batch: Tensors) -> Tensors:
        """The rank's slices of whole experts' canonical tensors; kept stored tensors stay as they are.

        The second matrix's bias is the first rank's alone, zeros elsewhere, so that the sum over ranks
        has it once.
        """
        return {role: self._cut(role, t) for role, t in batch.items()} if self.sliced else batch

    def _cut(self, role: str, t: Tensor) -> Tensor:
        if role == "w2_bias":
            return t if self.shard.tp_rank == 0 else torch.zeros_like(t)
        place = self._place(role, self.intermediate)
        if place is None:
            return t
        axis, stacked, low, high = place
        return _stack(t, axis, stacked).narrow(axis + 1, low, high - low).flatten(axis, axis + 1).contiguous()

    def join(self, batches: Sequence[Tensors], roles: Sequence[str]) -> dict[str, Tensor]:
        """Whole experts' canonical tensors `roles` of the slices of every tensor-parallel rank, in order.

        What is not sliced, and everything that is no such role, is the first rank's.
        """
        made = dict(batches[0])
        shares = [RankShare(self.whole, replace(self.shard, tp_rank=rank)) for rank in range(len(batches))]
        for role in roles:
            full = self._place(role, (0, self.whole.dims.intermediate))
            if full is None:
                continue
            made[role] = batches[0][role].new_empty(_resized(batches[0][role].shape, full))
            for share, batch in zip(shares, batches, strict=True):
                found = share._place(role, share.intermediate)
                assert found is not None
                axis, stacked, low, high = found
                place = _stack(made[role], axis, stacked).narrow(axis + 1, low, high - low)
                place.copy_(_stack(batch[role], axis, stacked))
        return made

    def _place(self, role: str, lanes: tuple[int, int]) -> Place | None:
        """Where `lanes`, first and last (exclusive), are in `role`; None for what every rank holds whole."""
        weight, (low, high) = self.whole.scheme.weight, lanes
        matrix, _, kind = role.partition("_")
        blocks = kind in ("scale", "zero")
        if matrix not in _AXES or kind not in ("", "bias", "scale", "zero") or role == "w2_bias":
            return None
        if blocks and weight.block[_AXES[matrix] - 1] == FULL:
            return None
        if matrix == "w2":
            low, high = (groups(weight, k) if blocks else k * min(weight.bits, 8) // 8 for k in (low, high))
            return 2, 1, low, high
        # Rows alone are interleaved; blocks of rows are counted in gate and up by themselves.
        stacked, by_row = halves(self.whole, role), not blocks or weight.block[0] == 1
        if self.whole.rows == INTERLEAVED and stacked == 2 and by_row:
            return 1, 1, 2 * low, 2 * high
        low, high = (scale_rows(weight, n) if blocks else n for n in (low, high))
        return 1, stacked, low, high


def _resized(shape: Sequence[int], place: Place) -> tuple[int, ...]:
    """`shape` with the elements of `place` alone."""
    axis, stacked, low, high = place
    return (*shape[:axis], stacked * (high - low), *shape[axis + 1 :])


def _stack(t: Tensor, axis: int, stacked: int) -> Tensor:
    """`t` with `axis` as `stacked` matrices and their own axis."""
    return t.view(*t.shape[:axis], stacked, -1, *t.shape[axis + 1 :])


_AXES = {"w13": 1, "w2": 2}
"""The axis of the intermediate size in each matrix."""


class SliceHashes:
    """SHA-256 of a rank's slices, one for each canonical role of a layer.

    Experts are hashed by themselves, in any order, and a role's hash is that of its experts' hashes one
    after the other: batches of any size give the same.
    """

    def __init__(self) -> None:
        self._experts: dict[str, dict[int, bytes]] = {}

    def take(self, batch: Tensors, first: int) -> None:
        """The slices of experts from `first` on."""
        for role, t in batch.items():
            found = self._experts.setdefault(role, {})
            for i, expert in enumerate(t):
                found[first + i] = hashlib.sha256(as_bytes(expert.contiguous())).digest()

    def result(self) -> dict[str, str]:
        """The hash of every role."""
        return {
            role: hashlib.sha256(b"".join(found[i] for i in sorted(found))).hexdigest()
            for role, found in self._experts.items()
        }
