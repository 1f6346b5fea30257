"""Builds a layer's kernel from the oracle's decision, the layer's weights and the process group."""

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
    """This rank's position in the layer's process group."""

    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class KernelRequest:
    """The inputs of `build_kernel` that are checked; `shared` is True if shared experts were given."""

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
    """The kernel of one layer that `decision` has chosen; it takes expert ids of the whole layer.

    Communication follows from the decision's deployment: with data parallelism every rank has its own
    tokens, which are gathered, and outputs are reduce-scattered; with tensor parallelism alone all ranks
    have the same tokens, and outputs are all-reduced.

    Args:
        decision: result of `oracle.select` for the layer and its deployment.
        prepared: the layer, or this rank's slice of it, prepared for the chosen backend.
        group: the process group of the deployment's ranks, in their order; None for one rank.
        shared: shared experts, whole on every rank: a function from this rank's tokens to their output,
            or one dense expert with the layer's activation function.
        form: activation format of the backend's input; None for what the chosen experts take.
        most_tokens: largest number of tokens of one rank in a call. With data parallelism, ranks then need
            not exchange token counts, and a call can be captured in a CUDA graph.
        dtype: dtype of the result and of sums over ranks; None for the tokens' dtype.
        memory: bytes that a call with `most_tokens` may use in addition to its arguments and its result.

    Raises:
        NoBackend: nothing was chosen, or the chosen backend has no kernel here or rejects the request.
        UsageError: decision, layer, process group and shared experts are inconsistent.
        Unavailable: a call takes more than `memory`.
    """
    chosen = decision.require()
    ranks = RankGroup() if group is None else RankGroup(dist.get_world_size(group), dist.get_rank(group))
    request = KernelRequest(decision, chosen, prepared, ranks, shared is not None)
    for check in CHECKS:
        if refusal := check(request):
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
    """The activation format that a candidate's experts take."""
    if chosen.variant.monolithic:
        return ActivationFormat.MONOLITHIC
    return ActivationFormat.BATCHED if chosen.variant.batched else ActivationFormat.STANDARD


def dense_shared(expert: DenseExpert, prepared: PreparedMoE) -> Shared:
    """A function that computes a dense shared expert on `prepared`'s device; weights are cast once, here."""
    device = prepared.device
    dtype = operand_dtype(device, prepared.problem)

    def moved(t: Tensor | None, dtype: torch.dtype = dtype) -> Tensor | None:
        return None if t is None else t.to(device, dtype)

    w13, w2 = expert.w13.to(device, dtype), expert.w2.to(device, dtype)
    biases = (moved(bias, torch.float32) for bias in (expert.w13_bias, expert.w2_bias))
    return partial(dense_output, expert=DenseExpert(w13, w2, *biases), problem=prepared.problem)


def _exchange(parallel: Parallel, group: dist.ProcessGroup | None, most: int | None) -> Exchange:
    if group is None:
        return SingleRankExchange()
    return GatheringExchange(group, most) if parallel.dp > 1 else ReplicatedExchange(group)


def _check_input_scales(kernel: FusedMoEKernel) -> None:
    """Raises NoBackend on every rank if ranks that exchange quantized tokens have different input scales."""
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


def _no_runner(request: KernelRequest) -> MoectlError | None:
    if request.chosen.backend.runner:
        return None
    return NoBackend(
        f"policy {request.decision.inputs.policy} chose {request.chosen.variant.experts} experts, "
        "which this tool has no kernel for",
        hint="select with the moectl policy, which names what runs here",
    )


def _other_backend(request: KernelRequest) -> MoectlError | None:
    if request.prepared.backend == request.chosen.backend.runner:
        return None
    return UsageError(
        f"the decision is for the {request.chosen.backend.runner} backend, the layer was prepared for "
        f"{request.prepared.backend}",
        hint="prepare the layer for the backend that was chosen",
    )


SPREAD = frozenset({"dims", "local_experts", "parallel"})
"""Fields in which the problem of a rank's slice may differ from the decision's."""


def _other_problem(request: KernelRequest) -> MoectlError | None:
    decided, prepared = _unpadded(request.decision.problem), _unpadded(request.prepared.problem)
    names = [field.name for field in fields(MoEProblem) if field.name not in SPREAD]
    # Slices of the intermediate size need not be equal: the last rank's may be smaller.
    names += ["dims"] if decided.parallel.tp_size == 1 else []
    differing = [name for name in names if getattr(decided, name) != getattr(prepared, name)]
    if not differing:
        return None
    pairs = "; ".join(f"{name} {getattr(decided, name)}, not {getattr(prepared, name)}" for name in differing)
    return UsageError(
        f"the decision is about another layer than the one prepared: {pairs}",
        hint="select for the layer's own problem",
    )


def _unpadded(problem: MoEProblem) -> MoEProblem:
    return replace(problem, dims=Dims(problem.dims.hidden, problem.dims.intermediate))


def _other_ranks(request: KernelRequest) -> MoectlError | None:
    decided, actual = request.decision.problem.parallel.ranks, request.ranks.size
    if actual == decided:
        return None
    return UsageError(
        f"the decision is for {decided} rank{'s' if decided > 1 else ''}, the process group has {actual}",
        hint="give the group of all ranks that share the layer, and none for one rank",
    )


def _other_share(request: KernelRequest) -> MoectlError | None:
    prepared, ranks, parallel = request.prepared, request.ranks, request.decision.problem.parallel
    problem = prepared.problem
    first, last = expert_range(problem.experts, parallel.ep_size, ranks.rank if parallel.ep else 0)
    actual = prepared.first_expert, prepared.first_expert + problem.local_experts
    if actual == (first, last):
        return None
    return UsageError(
        f"rank {ranks.rank} of {ranks.size} computes experts {first} to {last - 1}, the layer was prepared "
        f"with {actual[0]} to {actual[1] - 1}",
        hint="prepare this rank's share of the layer",
    )


def _no_shared_experts(request: KernelRequest) -> MoectlError | None:
    if not request.shared or request.prepared.problem.shared_experts:
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
"""Consistency checks of decision, layer, process group and shared experts; each returns an error or None."""
