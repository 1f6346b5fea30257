"""The judge of layer results: routing, activation and a fused-MoE layer in plain torch.

Written to be believed, not to be fast. Everything is computed in fp32, or in fp64 on request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import NoBackend, UsageError
from ..problem import Activation, MoEProblem, Routing
from .prepared import DenseExpert

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.sqrt(torch.nn.functional.softplus(logits)),
}
"""Scoring functions by the name in `Routing.scoring`."""

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
    if routing.scoring not in SCORES:
        raise NoBackend(
            f"routing scores {routing.scoring!r} are not known; the reference has {', '.join(SCORES)}"
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


def _silu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def _swigluoai(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    alpha = 1.0 if activation.alpha is None else activation.alpha
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


GATED: dict[str, Callable[[Tensor, Tensor, Activation], Tensor]] = {"silu": _silu, "swigluoai": _swigluoai}
"""Gated activation functions by the name in `Activation.name`."""


def split_rows(h13: Tensor, rows: str) -> tuple[Tensor, Tensor]:
    """(gate, up) halves ``[..., intermediate]`` of `h13` ``[..., 2 * intermediate]`` in `rows` order."""
    if rows == "interleaved":
        return h13[..., 0::2], h13[..., 1::2]
    if rows == "concatenated":
        half = h13.shape[-1] // 2
        return h13[..., :half], h13[..., half:]
    raise UsageError(f"row order must be 'interleaved' or 'concatenated', got {rows!r}")


def activate(h13: Tensor, activation: Activation, rows: str) -> Tensor:
    """``[..., intermediate]`` activations of the first GEMM's output ``[..., 2 * intermediate]``.

    A limit clamps gate from above and up on both sides before the function (gpt-oss).

    Raises NoBackend for an activation that is not gated or not in `GATED`.
    """
    if not activation.gated or activation.name not in GATED:
        raise NoBackend(
            f"activation {activation.name!r} (gated: {activation.gated}) is not known; "
            f"gated ones are {', '.join(GATED)}"
        )
    gate, up = split_rows(h13, rows)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return GATED[activation.name](gate, up, activation)


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
