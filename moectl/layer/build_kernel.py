"""A layer's kernel from the oracle's decision, the layer's weights and the ranks that share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MoectlError, NoBackend, Unavailable, UsageError
from ..kernels.modular.exchange import Exchange, GatheringExchange, ReplicatedExchange, SingleRankExchange
from ..kernels.modular.fused_moe_kernel import FusedMoEKernel, Shared, map_of
from ..kernels.prepared_layer import DenseExpert, PreparedMoE
from ..kernels.registry import runner_for
from ..kernels.runner import ActivationFormat
from ..kernels.torch_backends.torch_runner import dense_output, operand_dtype
from ..oracle.decision import Candidate, Decision
from ..problem.moe_problem import Dims, MoEProblem, Parallel, expert_range


@dataclass(frozen=True)
class RankGroup:
    """This rank among those that share the layer."""

    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class KernelRequest:
    """What a kernel is to be built of; `shared` tells whether shared experts are given."""

    decision: Decision
    chosen: Candidate
    prepared: PreparedMoE
    ranks: RankGroup
    shared: bool


def build_kernel(
    decision: Decision,
    prepared: PreparedMoE,
    *,
    group: dist.ProcessGroup | None = None,
    shared: Shared | DenseExpert | None = None,
    form: ActivationFormat | None = None,
    most_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    memory: int | None = None,
) -> FusedMoEKernel:
    """The kernel of one layer as `decision` has chosen it; ids that it takes are the layer's.

    What ranks do with each other follows from the decision's deployment: with data parallelism tokens
    are gathered and sums scattered, as every rank has tokens of its own; with tensor parallelism alone all
    have the same tokens, and outputs are summed.

    Args:
        decision: of `oracle.select` for the layer and its deployment.
        prepared: the layer, or this rank's share of it, for the backend that was chosen.
        group: the process group of the deployment's ranks, in their order; None for one rank.
        shared: shared experts, whole on every rank: what computes their output for this rank's tokens,
            or one dense expert with the layer's activation function.
        form: how the backend is given tokens; None for what the chosen experts take.
        most_tokens: of one rank in a call. With ranks that have tokens of their own, a call then asks
            nobody how many there are, and can be captured in a CUDA graph.
        dtype: of the result, and of sums over ranks; None for the tokens' own.
        memory: bytes that a call of `most_tokens` may take beside its arguments and its result.

    Raises:
        NoBackend: nothing was chosen, or the chosen backend has no kernel here or refuses what is asked.
        UsageError: decision, layer, group and the rest do not fit each other.
        Unavailable: a call takes more than `memory`.
    """
    chosen = decision.require()
    ranks = RankGroup() if group is None else RankGroup(dist.get_world_size(group), dist.get_rank(group))
    asked = KernelRequest(decision, chosen, prepared, ranks, shared is not None)
    for check in CHECKS:
        if refusal := check(asked):
            raise refusal
    kernel = FusedMoEKernel(
        prepared,
        runner_for(chosen.backend.runner),
        form or form_of(chosen),
        _exchange(decision.problem.parallel, group, most_tokens),
        dense_shared(shared, prepared) if isinstance(shared, DenseExpert) else shared,
        map_of(prepared) if prepared.problem.local_experts < prepared.problem.experts else None,
        dtype,
    )
    _check_input_scales(kernel)
    if memory is not None:
        _check_memory(kernel, most_tokens, memory)
    return kernel


def form_of(chosen: Candidate) -> ActivationFormat:
    """How the experts of a candidate are given tokens."""
    if chosen.variant.monolithic:
        return ActivationFormat.MONOLITHIC
    return ActivationFormat.BATCHED if chosen.variant.batched else ActivationFormat.STANDARD


def dense_shared(expert: DenseExpert, prepared: PreparedMoE) -> Shared:
    """What computes a dense shared expert where `prepared` is; its weights are cast once, here."""
    device = prepared.device
    dtype = operand_dtype(device, prepared.problem)

    def there(t: Tensor | None, dtype: torch.dtype = dtype) -> Tensor | None:
        return None if t is None else t.to(device, dtype)

    w13, w2 = expert.w13.to(device, dtype), expert.w2.to(device, dtype)
    biases = (there(bias, torch.float32) for bias in (expert.w13_bias, expert.w2_bias))
    return partial(dense_output, expert=DenseExpert(w13, w2, *biases), problem=prepared.problem)


def _exchange(parallel: Parallel, group: dist.ProcessGroup | None, most: int | None) -> Exchange:
    if group is None:
        return SingleRankExchange()
    return GatheringExchange(group, most) if parallel.dp > 1 else ReplicatedExchange(group)


def _check_input_scales(kernel: FusedMoEKernel) -> None:
    """NoBackend on every rank where ranks would read each other's tokens by other scales than their own."""
    scale = kernel.prepare_finalize.input_scale
    if scale is None:
        return
    low, high = kernel.exchange.range_over_ranks(scale)
    if low != high:
        raise NoBackend(
            f"ranks that gather each other's tokens need one scale of inputs, theirs are {low:g} to {high:g}",
            hint="prepare every rank's share with the largest scale of the whole layer's experts",
        )


def _check_memory(kernel: FusedMoEKernel, most_tokens: int | None, memory: int) -> None:
    if most_tokens is None:
        raise UsageError("memory is for a number of tokens, got none", hint="give most_tokens too")
    need = kernel.workspace(most_tokens)
    if need is None:
        raise NoBackend(f"the {kernel.runner.name} backend does not say how much memory a call takes")
    if need > memory:
        raise Unavailable(
            f"a call of {most_tokens} tokens on the {kernel.runner.name} backend takes up to {need} bytes, "
            f"allowed are {memory}",
            hint="build the kernel with fewer most_tokens",
        )


def _no_runner(asked: KernelRequest) -> MoectlError | None:
    if asked.chosen.backend.runner:
        return None
    return NoBackend(
        f"policy {asked.decision.inputs.policy} chose {asked.chosen.variant.experts} experts, "
        "which this tool has no kernel for",
        hint="select with the moectl policy, which names what runs here",
    )


def _other_backend(asked: KernelRequest) -> MoectlError | None:
    if asked.prepared.backend == asked.chosen.backend.runner:
        return None
    return UsageError(
        f"the decision is for the {asked.chosen.backend.runner} backend, the layer was prepared for "
        f"{asked.prepared.backend}",
        hint="prepare the layer for the backend that was chosen",
    )


SPREAD = frozenset({"dims", "local_experts", "parallel"})
"""Fields of a problem in which a rank's share may differ from what was decided about."""


def _other_problem(asked: KernelRequest) -> MoectlError | None:
    wanted, found = _unpadded(asked.decision.problem), _unpadded(asked.prepared.problem)
    names = [it.name for it in fields(MoEProblem) if it.name not in SPREAD]
    # Slices of an intermediate size need not be equal, the last rank's may be smaller.
    names += ["dims"] if wanted.parallel.tp_size == 1 else []
    wrong = [name for name in names if getattr(wanted, name) != getattr(found, name)]
    if not wrong:
        return None
    pairs = "; ".join(f"{name} {getattr(wanted, name)}, not {getattr(found, name)}" for name in wrong)
    return UsageError(
        f"the decision is about another layer than the one prepared: {pairs}",
        hint="select for the layer's own problem",
    )


def _unpadded(problem: MoEProblem) -> MoEProblem:
    return replace(problem, dims=Dims(problem.dims.hidden, problem.dims.intermediate))


def _other_ranks(asked: KernelRequest) -> MoectlError | None:
    wanted, have = asked.decision.problem.parallel.ranks, asked.ranks.size
    if have == wanted:
        return None
    return UsageError(
        f"the decision is for {wanted} rank{'s' if wanted > 1 else ''}, the process group has {have}",
        hint="give the group of all ranks that share the layer, and none for one rank",
    )


def _other_share(asked: KernelRequest) -> MoectlError | None:
    prepared, ranks, parallel = asked.prepared, asked.ranks, asked.decision.problem.parallel
    problem = prepared.problem
    first, last = expert_range(problem.experts, parallel.ep_size, ranks.rank if parallel.ep else 0)
    have = prepared.first_expert, prepared.first_expert + problem.local_experts
    if have == (first, last):
        return None
    return UsageError(
        f"rank {ranks.rank} of {ranks.size} computes experts {first} to {last - 1}, the layer was prepared "
        f"with {have[0]} to {have[1] - 1}",
        hint="prepare this rank's share of the layer",
    )


def _no_shared_experts(asked: KernelRequest) -> MoectlError | None:
    if not asked.shared or asked.prepared.problem.shared_experts:
        return None
    return UsageError("the layer has no shared experts, got some", hint="build the kernel without them")


CHECKS: tuple[Callable[[KernelRequest], MoectlError | None], ...] = (
    _no_runner,
    _other_backend,
    _other_problem,
    _other_ranks,
    _other_share,
    _no_shared_experts,
)
"""What a decision, a layer, a group and shared experts must have in common, each an error or None."""
