"""One rank's slice of a layer: a range of experts, and a range of intermediate channels of each.

Order of operations: slice, pad each half, convert. Canonical tensors are sliced on scale-block boundaries, so
that padding, value steps and layouts see the same as for a checkpoint that contains only the slice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import UsageError
from ..files.tensor_table import TensorType
from ..lazy_torch import Tensor, torch
from ..problem.moe_problem import Dims, MoEProblem, expert_range
from ..problem.rank_sizes import slice_range, slice_size
from ..problem.schemes import FULL
from .canonical import INTERLEAVED, groups, halves, scale_rows
from .steps.value_steps import Shapes, Tensors
from .stream.source_reader import as_bytes

AxisSlice = tuple[int, int, int, int]
"""Axis, number of matrices stacked along it, and first and last element (exclusive) within each matrix."""

LARGEST_WORLD = 1 << 16
"""Largest supported number of tensor-parallel or expert-parallel ranks."""


@dataclass(frozen=True)
class RankShard:
    """The position of one rank in a deployment.

    Experts are distributed over `ep_size` ranks, and each expert is sliced over `tp_size` ranks. Ranks that
    slice the same experts have consecutive numbers.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return self.tp_size * self.ep_size

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self.ep_rank * self.tp_size + self.tp_rank

    @property
    def possible(self) -> bool:
        """True if the ranks are within the sizes, which a manifest read from disk does not guarantee."""
        pairs = ((self.tp_rank, self.tp_size), (self.ep_rank, self.ep_size))
        return all(0 <= rank < size <= LARGEST_WORLD for rank, size in pairs)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks} (tp {self.tp_size}, ep {self.ep_size})"


def shard_of(rank: int, tp_size: int = 1, ep_size: int = 1) -> RankShard:
    """The `RankShard` of a rank's number; UsageError if there is no such rank.

    Example:
        >>> print(shard_of(3, tp_size=2, ep_size=2))
        rank 3 of 4 (tp 2, ep 2)
    """
    for name, size in (("--tp-size", tp_size), ("--ep-size", ep_size)):
        if not 1 <= size <= LARGEST_WORLD:
            raise UsageError(f"{name} must be 1 to {LARGEST_WORLD}, got {size}.")
    if not 0 <= rank < tp_size * ep_size:
        raise UsageError(
            f"there is no rank {rank} among {tp_size * ep_size} (--tp-size {tp_size}, --ep-size {ep_size}).",
            hint=f"Ranks are 0 to {tp_size * ep_size - 1}.",
        )
    return RankShard(tp_size, rank % tp_size, ep_size, rank // tp_size)


@dataclass(frozen=True)
class RankSlice:
    """What the rank `shard` holds of a layer; `whole` is the problem with all experts and logical sizes."""

    whole: MoEProblem
    shard: RankShard = RankShard()

    @property
    def sliced(self) -> bool:
        """True if the rank holds slices of experts instead of whole ones."""
        return self.shard.tp_size > 1

    @cached_property
    def experts(self) -> tuple[int, int]:
        """First and last expert (exclusive); UsageError if there are more ranks than experts."""
        if self.shard.ep_size > self.whole.experts:
            raise UsageError(
                f"{self.whole.experts} experts cannot be spread over {self.shard.ep_size} ranks.",
                hint="Choose --ep-size at most the number of experts.",
            )
        return expert_range(self.whole.experts, self.shard.ep_size, self.shard.ep_rank)

    @cached_property
    def intermediate(self) -> tuple[int, int]:
        """First and last intermediate channel (exclusive) of each expert; raises like `slice_range`."""
        return slice_range(self.whole, self.shard.tp_size, self.shard.tp_rank)

    @property
    def problem(self) -> MoEProblem:
        """The rank's problem with logical sizes; expert ids and the router are those of the whole layer."""
        (first, last), (low, high) = self.experts, self.intermediate
        return replace(self.whole, dims=Dims(self.whole.dims.hidden, high - low), local_experts=last - first)

    def padded(self, pad: Callable[[MoEProblem], MoEProblem]) -> MoEProblem:
        """The rank's problem, padded by `pad` to the sizes of the rank that holds most channels."""
        problem, most = self.problem, slice_size(self.whole, self.shard.tp_size)
        full = pad(replace(problem, dims=Dims(problem.dims.hidden, most))).dims
        return replace(problem, dims=replace(full, intermediate=problem.dims.intermediate))

    @property
    def partial(self) -> str:
        """A sentence on the rank's output being a partial sum; empty for a single rank."""
        if self.shard.ranks == 1:
            return ""
        (first, last), (low, high) = self.experts, self.intermediate
        return (
            f"{self.shard} has experts {first} to {last - 1} of {self.whole.experts} and intermediate "
            f"channels {low} to {high - 1} of {self.whole.dims.intermediate}: its output is a partial sum, "
            "and the sum over all ranks is the layer's"
        )

    def shapes(self, whole: Shapes) -> Shapes:
        """Canonical types of the rank's slices, from those of whole experts."""
        sliced = {}
        for role, (dtype, shape) in whole.items():
            axis_slice = self._axis_slice(role, self.intermediate)
            sliced[role] = TensorType(dtype, shape if axis_slice is None else _resized(shape, axis_slice))
        return sliced

    def slice(self, batch: Tensors) -> Tensors:
        """The rank's slices of whole experts' canonical tensors; kept source tensors are not sliced.

        The second matrix's bias is zero on all but the first tensor-parallel rank, so that the sum over
        ranks contains it once.
        """
        return {role: self._slice(role, t) for role, t in batch.items()} if self.sliced else batch

    def _slice(self, role: str, t: Tensor) -> Tensor:
        if role == "w2_bias":
            return t if self.shard.tp_rank == 0 else torch.zeros_like(t)
        axis_slice = self._axis_slice(role, self.intermediate)
        if axis_slice is None:
            return t
        axis, stacked, low, high = axis_slice
        return _stack(t, axis, stacked).narrow(axis + 1, low, high - low).flatten(axis, axis + 1).contiguous()

    def whole_shape(self, role: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of whole experts' canonical `role`, from the `shape` of the rank's slices."""
        full = self._axis_slice(role, (0, self.whole.dims.intermediate))
        return tuple(shape) if full is None else _resized(shape, full)

    def placed(self, role: str, t: Tensor) -> Tensor:
        """Whole experts' canonical `role` with the rank's slices `t` in their place, and ones elsewhere."""
        axis_slice = self._axis_slice(role, self.intermediate)
        if axis_slice is None:
            return t.clone()
        axis, stacked, low, high = axis_slice
        whole = t.new_ones(self.whole_shape(role, t.shape))
        _stack(whole, axis, stacked).narrow(axis + 1, low, high - low).copy_(_stack(t, axis, stacked))
        return whole

    def holds(self, role: str, axis: int, first: int, last: int) -> bool:
        """Whether the rank has any of elements `first` to `last` (exclusive) of whole `role` along `axis`."""
        if role == "w2_bias" and self.shard.tp_rank:
            return False
        axis_slice = self._axis_slice(role, self.intermediate)
        if axis_slice is None or axis_slice[0] != axis:
            return first < last
        _, stacked, low, high = axis_slice
        full = self._axis_slice(role, (0, self.whole.dims.intermediate))
        assert full is not None
        size = full[3]
        return any(max(first, i * size + low) < min(last, i * size + high) for i in range(stacked))

    def join(self, batches: Sequence[Tensors], roles: Sequence[str]) -> dict[str, Tensor]:
        """Whole experts' canonical tensors `roles`, from the slices of all tensor-parallel ranks, in order.

        Tensors that are not sliced, and those not in `roles`, are taken from the first rank.
        """
        joined = dict(batches[0])
        slices = [RankSlice(self.whole, replace(self.shard, tp_rank=rank)) for rank in range(len(batches))]
        for role in roles:
            full = self._axis_slice(role, (0, self.whole.dims.intermediate))
            if full is None:
                continue
            joined[role] = batches[0][role].new_empty(_resized(batches[0][role].shape, full))
            for rank_slice, batch in zip(slices, batches, strict=True):
                axis_slice = rank_slice._axis_slice(role, rank_slice.intermediate)
                assert axis_slice is not None
                axis, stacked, low, high = axis_slice
                target = _stack(joined[role], axis, stacked).narrow(axis + 1, low, high - low)
                target.copy_(_stack(batch[role], axis, stacked))
        return joined

    def _axis_slice(self, role: str, channels: tuple[int, int]) -> AxisSlice | None:
        """The elements of `role` for intermediate `channels`; None if every rank holds all of the role."""
        weight, (low, high) = self.whole.scheme.weight, channels
        matrix, _, kind = role.partition("_")
        blocks = kind in ("scale", "zero")
        if matrix not in _AXES or kind not in ("", "bias", "scale", "zero") or role == "w2_bias":
            return None
        if blocks and weight.block[_AXES[matrix] - 1] == FULL:
            return None
        if matrix == "w2":
            low, high = (groups(weight, k) if blocks else k * min(weight.bits, 8) // 8 for k in (low, high))
            return 2, 1, low, high
        # Only rows are interleaved; blocks of rows are counted separately in gate and up.
        stacked, by_row = halves(self.whole, role), not blocks or weight.block[0] == 1
        if self.whole.rows == INTERLEAVED and stacked == 2 and by_row:
            return 1, 1, 2 * low, 2 * high
        low, high = (scale_rows(weight, n) if blocks else n for n in (low, high))
        return 1, stacked, low, high


def _resized(shape: Sequence[int], axis_slice: AxisSlice) -> tuple[int, ...]:
    """`shape` reduced to the elements of `axis_slice`."""
    axis, stacked, low, high = axis_slice
    return (*shape[:axis], stacked * (high - low), *shape[axis + 1 :])


def _stack(t: Tensor, axis: int, stacked: int) -> Tensor:
    """A view of `t` with `axis` split into `[stacked, size of one matrix]`."""
    return t.view(*t.shape[:axis], stacked, -1, *t.shape[axis + 1 :])


_AXES = {"w13": 1, "w2": 2}
"""The axis of the intermediate channels in each matrix."""


class SliceHashes:
    """SHA-256 of a rank's slices, one for each canonical role of a layer.

    Experts are hashed separately, in any order, and a role's hash is that of its experts' concatenated
    digests, so that it does not depend on the batch size.
    """

    def __init__(self) -> None:
        self._experts: dict[str, dict[int, bytes]] = {}

    def take(self, batch: Tensors, first: int) -> None:
        """Adds the slices of a batch whose first expert is `first`."""
        for role, t in batch.items():
            digests = self._experts.setdefault(role, {})
            for i, expert in enumerate(t):
                digests[first + i] = hashlib.sha256(as_bytes(expert.contiguous())).digest()

    def result(self) -> dict[str, str]:
        """The hash of each role."""
        return {
            role: hashlib.sha256(b"".join(digests[i] for i in sorted(digests))).hexdigest()
            for role, digests in self._experts.items()
        }
