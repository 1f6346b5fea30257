"""The judge of layer results: routing, activation and a fused-MoE layer in plain torch.

Written to be believed, not to be fast. Everything is computed in fp32, or in fp64 on request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import NoBackend, UsageError
from ..problem import MoEProblem, Routing
from .activation import activate
from .prepared import DenseExpert

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.sqrt(torch.nn.functional.softplus(logits)),
}
"""Scoring functions by the name in `Routing.scoring`."""

SPARSEMIXER = "sparsemixer"
"""A scoring that weighs each chosen expert by itself, and is no function of all scores."""

JITTER = 0.01
"""Half of the relative distance within which experts count as near each other (Phi-3.5-MoE)."""

SMALLEST_SUM = 1e-20
"""Lower bound of the sum that weights are divided by (the DeepSeek-V3 model adds the same number)."""


def route(
    logits: Tensor,
    problem: MoEProblem,
    correction_bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Chosen expert ids ``[tokens, top_k]`` int32 and their weights ``[tokens, top_k]`` in `dtype`.

    Experts come in falling order of their (biased) score; ties go to the lower expert id.

    Args:
        logits: ``[tokens, experts]`` of any float dtype.
        problem: its `routing`, `experts` and `top_k` say what is computed.
        correction_bias: ``[experts]``, needed exactly when the routing has one.

    Raises:
        UsageError: shapes that do not fit the problem, or a missing or surplus correction bias.
        NoBackend: a scoring function that is not in `SCORES`.
    """
    routing = problem.routing
    _check_routing(logits, problem, correction_bias)
    logits = logits.to(dtype)
    if routing.scoring == SPARSEMIXER:
        ids, weights = _sparsemixer(logits, problem.top_k)
        return ids.to(torch.int32), weights * routing.scale
    scores = logits if routing.after_topk else SCORES[routing.scoring](logits)
    choice = scores if correction_bias is None else scores + correction_bias.to(dtype)
    if routing.groups and routing.topk_groups and routing.topk_groups < routing.groups:
        choice = _keep_best_groups(choice, routing)
    ids = _first(choice, problem.top_k)
    weights = scores.gather(1, ids)
    if routing.after_topk:
        weights = SCORES[routing.scoring](weights)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)
    return ids.to(torch.int32), weights * routing.scale


def _sparsemixer(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and weights of the `k` best experts, each weighed among those that come near it.

    An expert's weight is its share in a softmax over those not chosen before whose logits are at most
    `2 * JITTER` below it, relative to the larger magnitude (the Phi-3.5-MoE model).
    """
    left, ids, weights = logits, [], []
    for _ in range(k):
        best = _first(left, 1)
        largest = left.gather(1, best)
        far = (largest - logits) / torch.maximum(logits.abs(), largest) > 2 * JITTER
        ids.append(best)
        weights.append(torch.softmax(left.masked_fill(far, float("-inf")), -1).gather(1, best))
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(ids, 1), torch.cat(weights, 1)


def _first(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest values per row; a stable sort makes ties go to the lower index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def _keep_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """`choice` with -inf outside the best expert groups.

    A group's score is its best expert's, or with a correction bias the sum of its two best
    (DeepSeek-V2 and -V3 model definitions).
    """
    groups, kept = routing.groups or 1, routing.topk_groups or 1
    by_group = choice.view(len(choice), groups, -1)
    count = min(2 if routing.correction_bias else 1, by_group.shape[-1])
    best = _first(by_group.topk(count, dim=-1).values.sum(-1), kept)
    keep = torch.zeros(len(choice), groups, dtype=torch.bool, device=choice.device).scatter_(1, best, True)
    return by_group.masked_fill(~keep[..., None], float("-inf")).flatten(1)


def _check_routing(logits: Tensor, problem: MoEProblem, correction_bias: Tensor | None) -> None:
    routing = problem.routing
    if routing.scoring not in (*SCORES, SPARSEMIXER):
        raise NoBackend(
            f"routing scores {routing.scoring!r} are not known; "
            f"the reference has {', '.join((*SCORES, SPARSEMIXER))}"
        )
    if logits.ndim != 2 or logits.shape[1] != problem.experts:
        raise UsageError(
            f"router logits must be [tokens, {problem.experts}], got {list(logits.shape)}",
            hint="check the router's weight against the number of experts",
        )
    if routing.correction_bias != (correction_bias is not None):
        has = "has none" if correction_bias is None else "got one"
        needs = "needs" if routing.correction_bias else "takes no"
        raise UsageError(f"the routing {needs} correction bias, but the call {has}")
    if correction_bias is not None and correction_bias.shape != (problem.experts,):
        raise UsageError(
            f"the correction bias must be [{problem.experts}], got {list(correction_bias.shape)}"
        )
    if routing.groups and problem.experts % routing.groups:
        raise UsageError(f"{problem.experts} experts do not divide into {routing.groups} groups")


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
        dense: the decoded expert of an id; asked only for experts that got tokens.
        problem: its activation, row order and routing say what is computed.
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
