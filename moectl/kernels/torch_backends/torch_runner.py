"""The torch backend: any layout, CPU or GPU. Decodes the experts with tokens, two matmuls for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...problem.moe_problem import MoEProblem
from ..activation import activate
from ..prepared_layer import DenseExpert, PreparedMoE
from ..runner import Runner
from .decoding import decoded, linear, refusal


def operand_dtype(device: torch.device, problem: MoEProblem) -> torch.dtype:
    """Dtype of the matmul operands on a CPU or a GPU.

    fp32 costs nothing on a CPU, where decoding dominates; a GPU's 16-bit matmul accumulates in fp32. In
    fp16, decoded weights with small scales would lose bits, and large ones would overflow.
    """
    on_gpu = device.type == "cuda" and problem.dtype == "bf16"
    return torch.bfloat16 if on_gpu else torch.float32


@dataclass(frozen=True)
class _Group:
    """Assignments of one expert: their `tokens` ``[n]`` and routing `weights` ``[n, 1]``."""

    expert: int
    tokens: Tensor
    weights: Tensor


def _groups(ids: Tensor, weights: Tensor, experts: int) -> list[_Group]:
    """Assignments by expert, tokens in ascending order; ids outside 0 to experts - 1 are left out."""
    flat = ids.flatten().long()
    valid = (flat >= 0) & (flat < experts)
    order = torch.argsort(torch.where(valid, flat, experts), stable=True)
    counts = torch.bincount(flat[valid], minlength=experts).tolist()
    tokens = order // ids.shape[1]
    scales = weights.flatten()[order].unsqueeze(1)
    groups, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            groups.append(_Group(expert, tokens[start:stop], scales[start:stop]))
            start = stop
    return groups


def dense_output(inputs: Tensor, expert: DenseExpert, problem: MoEProblem) -> Tensor:
    """``[n, hidden]`` fp32: the output of one expert for all `inputs` ``[n, hidden]``."""
    dtype = operand_dtype(inputs.device, problem)
    h13 = linear(inputs.to(dtype), expert.w13, expert.w13_bias)
    hidden = activate(h13, problem.activation, problem.rows)
    return linear(hidden.to(dtype), expert.w2, expert.w2_bias)


def _expert(group: _Group, expert: DenseExpert, x: Tensor, problem: MoEProblem) -> Tensor:
    """``[n, hidden]`` fp32: the weighted output of one expert for its tokens."""
    inputs = x[group.tokens]
    if problem.routing.weight_on_input:
        return dense_output(inputs.float() * group.weights, expert, problem)
    return dense_output(inputs, expert, problem) * group.weights


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    problem = prepared.problem
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    # One expert after the other, each token at most once per expert: sums have a fixed order.
    groups = {group.expert: group for group in _groups(ids, weights, problem.local_experts)}
    for number, expert in decoded(prepared, list(groups)):
        group = groups[number]
        y.index_add_(0, group.tokens, _expert(group, expert, x, problem))
    return y.to(x.dtype)


def _batched(prepared: PreparedMoE, x: Tensor, counts: Tensor, expected: int | None = None) -> Tensor:
    problem, y = prepared.problem, torch.empty_like(x)
    numbers = counts.tolist()
    hit = [number for number, count in enumerate(numbers) if count]
    for number, expert in decoded(prepared, hit):
        tokens = x[number, : numbers[number]]
        y[number, : len(tokens)] = dense_output(tokens, expert, problem).to(y.dtype)
    return y


RUNNER = Runner("torch", None, _compute, refusal, capturable=False, batched=_batched)
