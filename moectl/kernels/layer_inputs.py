"""Inputs of a layer: random tokens, and router logits of a named distribution; the work of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UsageError
from ..problem.moe_problem import MoEProblem
from ..problem.roofline import LayerWork, work_of_hits
from ..torch_dtypes import MODEL_TORCH_DTYPES
from .reference import route
from .routing_distributions import parse_distribution


@dataclass(frozen=True)
class LayerInputs:
    """One call's inputs.

    Attributes:
        x: ``[tokens, hidden]`` in the model's dtype.
        ids: ``[tokens, top_k]`` int32.
        weights: ``[tokens, top_k]`` fp32.
        logits: ``[tokens, experts]`` fp32, from which ids and weights follow.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    logits: Tensor


def make_inputs(
    problem: MoEProblem,
    tokens: int,
    seed: int = 0,
    distribution: str = "uniform",
    *,
    device: torch.device | str = "cpu",
) -> LayerInputs:
    """Random inputs of `tokens` tokens, the same for the same seed on every device.

    Args:
        distribution: how often experts are chosen: ``uniform``, ``balanced`` (dealt in turn),
            ``zipf:A`` (the r-th most popular expert with weight 1/r**A), ``hot:N:F`` (N experts
            share the fraction F of the choices) or ``experts:N`` (N experts alone, or as many as a token
            needs).

    Raises UsageError for a negative number of tokens or a distribution that is none of these.

    Example:
        >>> from moectl.problem.published_layers import model_problem
        >>> problem = model_problem("gpt-oss-20b")
        >>> inputs = make_inputs(problem, 3)
        >>> inputs.x.shape[0], tuple(inputs.ids.shape) == (3, problem.top_k)
        (3, True)
    """
    if tokens < 0:
        raise UsageError(f"the number of tokens must not be negative, got {tokens}")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, problem.dims.hidden, generator=generator)
    logits = random_logits(problem, tokens, distribution, generator)
    # With a correction bias of zero the logits alone decide which experts are chosen.
    inputs = inputs_from(problem, x.to(MODEL_TORCH_DTYPES[problem.dtype]), logits, no_bias(problem))
    return LayerInputs(*(t.to(device) for t in (inputs.x, inputs.ids, inputs.weights, inputs.logits)))


def inputs_from(
    problem: MoEProblem, x: Tensor, logits: Tensor, correction_bias: Tensor | None = None
) -> LayerInputs:
    """`x` with the ids and weights to which the reference routes `logits`.

    A router's table of ids and factors by expert are left out: the logits alone decide.
    """
    by_logits = replace(problem, routing=replace(problem.routing, hashed=False, expert_scale=False))
    ids, weights = route(logits, by_logits, correction_bias)
    return LayerInputs(x, ids, weights, logits)


def work_of(problem: MoEProblem, ids: Tensor) -> LayerWork:
    """Bytes and FLOPs of a call with expert `ids` ``[tokens, top_k]``; negative ids are skipped."""
    valid = ids[ids >= 0]
    return work_of_hits(problem, len(ids), int(valid.numel()), torch.unique(valid).numel())


def check_tokens(x: Tensor | None, problem: MoEProblem, what: str) -> None:
    """Raises UsageError unless `x`, called `what`, are tokens of the layer, finite in its dtype."""
    if x is None or x.ndim != 2 or x.shape[1] != problem.dims.hidden or not x.is_floating_point():
        got = "none" if x is None else f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        raise UsageError(f"{what} must be floats [tokens, {problem.dims.hidden}], got {got}")
    wrong = ~torch.isfinite(x.float().to(MODEL_TORCH_DTYPES[problem.dtype])).all(1)
    if bool(wrong.any()):
        raise UsageError(
            f"{what} must be finite in {problem.dtype}, token {int(wrong.nonzero()[0])} is not",
            hint="no result of it could be right or wrong",
        )


def check_ids(ids: Tensor, problem: MoEProblem, what: str, *, none: bool = False) -> None:
    """Raises UsageError unless each row of `ids`, called `what`, names different experts of the layer.

    With `none`, -1 is allowed for no expert, any number of times in a row.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UsageError(f"{what} must be whole numbers, got {str(ids.dtype).removeprefix('torch.')}")
    ids = ids.long()
    wrong = (ids < (-1 if none else 0)) | (ids >= problem.experts)
    ordered = ids.sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    known = f"an expert, 0 to {problem.experts - 1}"
    for where, found in (
        (wrong, f"a number that is neither {known}, nor -1 for none" if none else f"what is not {known}"),
        (again, "an expert twice"),
    ):
        if bool(where.any()):
            token = int(where.any(1).nonzero()[0])
            raise UsageError(f"token {token} of {what} has {found}: {ids[token].tolist()}")


def no_bias(problem: MoEProblem) -> Tensor | None:
    """A correction bias of zeros where the routing needs one."""
    return torch.zeros(problem.experts) if problem.routing.correction_bias else None


def random_logits(problem: MoEProblem, tokens: int, distribution: str, generator: torch.Generator) -> Tensor:
    """``[tokens, experts]`` log-odds with Gumbel noise, whose top-k is a draw without replacement.

    On the device of `generator`.
    """
    name, arguments = parse_distribution(distribution)
    shape, device = (tokens, problem.experts), generator.device
    uniform = torch.rand(shape, generator=generator, device=device).clamp(1e-9, 1 - 1e-7)
    if name == "balanced":
        slots = torch.arange(tokens * problem.top_k, device=device) % problem.experts
        dealt = torch.zeros(shape, device=device).scatter_(1, slots.view(tokens, problem.top_k), 2.0)
        return dealt + uniform
    odds = LOG_ODDS[name](problem, *arguments).to(device)
    order = torch.randperm(problem.experts, generator=generator, device=device)
    return odds[order] - torch.log(-torch.log(uniform))


NEVER = -1e4
"""Log-odds of experts that are never chosen while another one remains: the noise is far smaller."""


def _uniform(problem: MoEProblem) -> Tensor:
    return torch.zeros(problem.experts)


def _zipf(problem: MoEProblem, exponent: float) -> Tensor:
    return -exponent * torch.arange(1, problem.experts + 1).float().log()


def _only(problem: MoEProblem, count: float) -> Tensor:
    odds = torch.full((problem.experts,), NEVER)
    odds[: max(int(count), problem.top_k)] = 0.0
    return odds


def _hot(problem: MoEProblem, count: float, fraction: float) -> Tensor:
    experts = problem.experts
    if count >= experts:
        raise UsageError(
            f"routing distribution hot:N:F must leave one of {experts} experts out, got N = {count:.0f}",
            hint=f"use an N below {experts}",
        )
    odds = torch.full((experts,), (1 - fraction) / (experts - count))
    odds[: int(count)] = fraction / count
    return odds.log()


LOG_ODDS: dict[str, Callable[..., Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "hot": _hot,
    "experts": _only,
}
"""Log-odds of every expert by distribution; ``balanced`` draws nothing and has none."""
