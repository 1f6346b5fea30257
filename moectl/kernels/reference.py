"""The reference for layer results: routing, activation and a fused-MoE layer in plain torch.

Written to be obviously correct, not to be fast. Everything is computed in fp32, or in fp64 on request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import NoBackend, UsageError
from ..problem.moe_problem import MoEProblem, Routing
from .activation import activate
from .prepared_layer import DenseExpert


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the logits that are not NaN; NaN stays NaN."""
    return torch.softmax(logits.masked_fill(logits.isnan(), -torch.inf), -1) + 0 * logits


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    """sqrt(softplus(l)) as ``log(exp(l) + exp(0))``; torch's softplus returns its argument beyond 20."""
    return torch.sqrt(torch.logaddexp(logits, torch.zeros_like(logits)))


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}
"""Scoring functions by the name in `Routing.scoring`, of fp64 logits. The score of NaN is NaN."""

SPARSEMIXER = "sparsemixer"
"""A scoring that weighs each chosen expert separately, and is not a function of all scores."""

JITTER = 0.01
"""Half the relative distance within which experts share a softmax (Phi-3.5-MoE's jitter noise)."""

SMALLEST_SUM = 1e-20
"""Lower bound of the sum that weights are divided by (the DeepSeek-V3 model adds the same number)."""

LARGEST_LOGIT = torch.finfo(torch.float32).max
"""What replaces an infinite logit, with its sign."""


def route(
    logits: Tensor,
    problem: MoEProblem,
    correction_bias: Tensor | None = None,
    *,
    expert_scale: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Chosen expert ids ``[tokens, top_k]`` int32 and their weights ``[tokens, top_k]`` in `dtype`.

    Experts are ordered by logit (every score increases with it), or with a correction bias by
    ``score + bias`` in `dtype`, of the exact score rounded to it, largest first; ties go to the lower expert
    id. A large bias rounds scores away and so makes ties. Weights come from the scores alone; they are
    computed in fp64 and rounded once.

    Groups are ordered by their best expert's logit, with a correction bias by the sum of their two best
    experts' biased scores, added in `dtype` (DeepSeek-V2 and -V3 model definitions); ties go to the lower
    group.

    NaN, as a logit or a biased score, is never chosen while there are numbers, and is left out of sums.
    A chosen expert with a NaN logit has the weight NaN: a row of NaN has the ids 0, 1, ... and
    weights NaN. An infinite logit is replaced by the largest fp32 number of its sign.

    Args:
        logits: ``[tokens, experts]`` of any float dtype.
        problem: its `routing`, `experts` and `top_k` define what is computed.
        correction_bias: ``[experts]``, required exactly when the routing has one.
        expert_scale: ``[experts]`` factors on the final weights, likewise.
        table: ``[vocabulary, top_k]`` integer expert ids by token id, required exactly when the routing
            is hashed: the ids are its rows, in their order, and the scores are only weights. A token id or
            an expert id out of range gives id -1 with weight 0; on a CPU it is an error.
        token_ids: ``[tokens]`` integers, required with a table.

    Raises:
        UsageError: tensors that do not fit the problem, are missing or not expected.
        NoBackend: a scoring function that is not in `SCORES`.

    Example:
        >>> from moectl.problem.moe_problem import Dims, MoEProblem
        >>> from moectl.problem.schemes import BF16, Scheme
        >>> problem = MoEProblem(Dims(64, 64), experts=4, top_k=2, scheme=Scheme(BF16))
        >>> ids, weights = route(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), problem)
        >>> ids.tolist()
        [[1, 3]]
    """
    routing, k = problem.routing, problem.top_k
    check_routing(logits, problem, correction_bias, expert_scale, table, token_ids)
    logits = logits.double().clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    if routing.scoring == SPARSEMIXER:
        ids = _first(logits, k)
        weights = _sparsemixer(logits, ids)
    else:
        scores = logits if routing.after_topk else SCORES[routing.scoring](logits)
        if table is None or token_ids is None:
            choice = logits if correction_bias is None else scores.to(dtype) + correction_bias.to(dtype)
            ids = _first(_keep_best_groups(choice, routing), k)
        else:
            ids = _looked_up(table, token_ids, problem.experts)
        weights = scores.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, torch.nan)
        if routing.after_topk:
            weights = SCORES[routing.scoring](weights)
    if routing.renormalize:
        weights = weights / weights.nansum(-1, keepdim=True).clamp_min(SMALLEST_SUM)
    weights = weights * routing.scale
    if expert_scale is not None:
        weights = weights * expert_scale.double()[ids.clamp_min(0)]
    return ids.to(torch.int32), weights.masked_fill(ids < 0, 0).to(dtype)


def _sparsemixer(logits: Tensor, ids: Tensor) -> Tensor:
    """Weights of the experts `ids`, the best first, each from a softmax over the experts near it.

    An expert's weight is its share in a softmax over those not chosen before whose logits are at most
    `2 * JITTER` below it, relative to the larger magnitude (the Phi-3.5-MoE model).
    """
    taken, weights = logits.isnan(), []
    for expert in torch.split(ids, 1, dim=1):
        largest = logits.gather(1, expert)
        far = (largest - logits) / torch.maximum(logits.abs(), largest) > 2 * JITTER
        near = torch.exp(logits - largest).masked_fill(far | taken, 0)
        weights.append(1 / near.sum(-1, keepdim=True) + 0 * largest)
        taken = taken.scatter(1, expert, True)
    return torch.cat(weights, 1)


def _first(choice: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest values per row, NaN last; stable sorts make ties go to the lower index."""
    nan = choice.isnan()
    order = torch.sort(choice.masked_fill(nan, -torch.inf), dim=-1, descending=True, stable=True).indices
    numbers_first = torch.sort(nan.gather(-1, order).int(), dim=-1, stable=True).indices
    return order.gather(-1, numbers_first)[..., :k]


def _keep_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """`choice` with -inf for the numbers outside the best expert groups."""
    groups, kept = routing.groups or 1, routing.topk_groups or 1
    if not limits(routing):
        return choice
    by_group = choice.view(len(choice), groups, choice.shape[1] // groups)
    count = min(2 if routing.correction_bias else 1, by_group.shape[-1])
    best = by_group.gather(-1, _first(by_group, count)).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    keep = torch.zeros(len(choice), groups, dtype=torch.bool, device=choice.device)
    keep.scatter_(1, _first(best.sum(-1), kept), True)
    out: Tensor = by_group.masked_fill(~(keep[..., None] | by_group.isnan()), -torch.inf)
    return out.flatten(1)


def limits(routing: Routing) -> bool:
    """Whether groups limit the choice."""
    return bool(routing.groups and routing.topk_groups and routing.topk_groups < routing.groups)


def _looked_up(table: Tensor, token_ids: Tensor, experts: int) -> Tensor:
    """``[tokens, top_k]`` int64 expert ids of `table`; -1 for what is out of range."""
    known = ((token_ids >= 0) & (token_ids < len(table)))[:, None]
    ids = table[token_ids.long().clamp(0, len(table) - 1)].long()
    return ids.where(known & (ids >= 0) & (ids < experts), -1)


def check_routing(
    logits: Tensor,
    problem: MoEProblem,
    correction_bias: Tensor | None,
    expert_scale: Tensor | None,
    table: Tensor | None,
    token_ids: Tensor | None,
) -> None:
    """Raises what `route` raises for arguments that do not fit the problem or each other."""
    routing, experts = problem.routing, problem.experts
    _check_method(problem)
    if logits.ndim != 2 or logits.shape[1] != experts:
        raise UsageError(
            f"router logits must be [tokens, {experts}], got {list(logits.shape)}",
            hint="check the router's weight against the number of experts",
        )
    if not logits.is_floating_point():
        raise UsageError(f"router logits must be floats, got {logits.dtype}")
    for needed, name, t, shape in (
        (routing.correction_bias, "correction bias", correction_bias, (experts,)),
        (routing.expert_scale, "expert scale", expert_scale, (experts,)),
        (routing.hashed, "table of expert ids", table, (None, problem.top_k)),
        (routing.hashed, "token ids", token_ids, (len(logits),)),
    ):
        _check_operand(needed, name, t, shape)
        if t is not None and t.device != logits.device:
            raise UsageError(f"logits and {name} must be on one device, got {logits.device} and {t.device}")
    if table is not None and token_ids is not None and logits.device.type == "cpu":
        # Copying them from a GPU would stall it, and is not possible inside a CUDA graph.
        _check_range("token ids", token_ids, len(table))
        _check_range("expert ids of the table", table[token_ids.long()], experts)


def _check_method(problem: MoEProblem) -> None:
    routing, experts, k = problem.routing, problem.experts, problem.top_k
    known = (*SCORES, SPARSEMIXER)
    if routing.scoring not in known:
        raise NoBackend(
            f"routing scores {routing.scoring!r} are not known; the reference has {', '.join(known)}"
        )
    if routing.scoring == SPARSEMIXER and (routing.correction_bias or routing.hashed or limits(routing)):
        raise NoBackend("sparsemixer takes no correction bias, no groups and no table, the routing has one")
    if routing.groups and experts % routing.groups:
        raise UsageError(f"{experts} experts do not divide into {routing.groups} groups")
    left = experts // (routing.groups or 1) * (routing.topk_groups or 1) if limits(routing) else experts
    if k > left and not routing.hashed:
        raise UsageError(f"{k} experts a token cannot be chosen from {left}", hint="check top_k and groups")


def _check_operand(needed: bool, name: str, t: Tensor | None, shape: tuple[int | None, ...]) -> None:
    if needed != (t is not None):
        has = "has none" if t is None else "got one"
        raise UsageError(f"the routing {'needs' if needed else 'takes no'} {name}, but the call {has}")
    if t is None:
        return
    if t.ndim != len(shape) or any(b is not None and a != b for a, b in zip(t.shape, shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise UsageError(f"the {name} must be [{wanted}], got {list(t.shape)}")
    if t.is_floating_point() == name.endswith("ids"):
        raise UsageError(
            f"the {name} must be {'integers' if name.endswith('ids') else 'floats'}, got {t.dtype}"
        )


def _check_range(name: str, t: Tensor, most: int) -> None:
    if t.numel() and not 0 <= int(t.min()) <= int(t.max()) < most:
        raise UsageError(f"{name} must be 0 to {most - 1}, got {int(t.min())} to {int(t.max())}")


def moe_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    dense: Callable[[int], DenseExpert],
    problem: MoEProblem,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``[tokens, hidden]`` layer output in `dtype`: sum over a token's experts of weight * expert(x).

    Args:
        x: ``[tokens, hidden]``.
        ids: ``[tokens, top_k]`` integer expert ids; a negative id is a skipped assignment.
        weights: ``[tokens, top_k]`` routing weights.
        dense: returns an expert decoded, by id; called only for experts that have tokens.
        problem: its activation, row order and routing define what is computed.

    Example:
        >>> from moectl.problem.moe_problem import Dims, MoEProblem
        >>> from moectl.problem.schemes import BF16, Scheme
        >>> problem = MoEProblem(Dims(8, 4), experts=1, top_k=1, scheme=Scheme(BF16))
        >>> expert = DenseExpert(w13=torch.ones(8, 8), w2=torch.ones(8, 4))
        >>> moe_reference(torch.ones(2, 8), torch.zeros(2, 1).int(), torch.ones(2, 1),
        ...               lambda expert_id: expert, problem).shape
        torch.Size([2, 8])
    """
    x = x.to(dtype)
    weights = weights.to(dtype)
    y = torch.zeros_like(x)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        weight = weights[token, slot].unsqueeze(1)
        e = dense(expert)
        inputs = x[token] * weight if problem.routing.weight_on_input else x[token]
        hidden = activate(_linear(inputs, e.w13, e.w13_bias), problem.activation, problem.rows)
        out = _linear(hidden, e.w2, e.w2_bias)
        y.index_add_(0, token, out if problem.routing.weight_on_input else out * weight)
    return y


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight.to(x).T
    return y if bias is None else y + bias.to(x)
