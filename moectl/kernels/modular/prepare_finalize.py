"""Prepare (quantize, gather, map ids, batch tokens) and finalize (weigh, sum, return results)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...problem.schemes import A16, ActFormat
from ..prepared_layer import PreparedMoE
from ..quantize_tokens import QuantizedTokens, in_tiles, quantize
from ..runner import ActivationFormat, Runner
from .batching import ExpertMajorBatches, batches_of
from .exchange import Exchange

NO_EXPERT = -1
"""The id of a skipped assignment: no expert, or an expert of another rank."""


@dataclass(frozen=True)
class Dispatched:
    """One call's tokens of all ranks, as the experts take them.

    Attributes:
        tokens: in the experts' number format and activation format.
        rows: tokens of this rank.
        ids, weights: ``[all rows, top_k]``, local ids; None with logits.
        logits: ``[all rows, experts]``, for monolithic experts.
        batches: positions of assignments in batched tokens.
    """

    tokens: Tensor | QuantizedTokens
    rows: int
    ids: Tensor | None = None
    weights: Tensor | None = None
    logits: Tensor | None = None
    batches: ExpertMajorBatches | None = None


@dataclass(frozen=True, eq=False)
class PrepareFinalize:
    """The steps before and after one layer's experts: weigh, quantize, gather, map ids, batch; the inverse.

    Tokens are quantized before they are sent, with their scales row by row. Scales are tiled after the
    exchange, because a tile can have rows of several ranks.

    Attributes:
        prepared: the layer; sizes and routing are read from its problem.
        runner: the backend's experts.
        form: the runner's activation format in use.
        exchange: communication between ranks.
        wants: the number format in which the runner takes this layer's tokens.
        expert_map: ``[experts]`` int32 from the layer's ids to local ids, `NO_EXPERT` for experts of
            other ranks; None where calls pass local ids.
        input_scale: the layer's one scale of tokens, if the format has one.
    """

    prepared: PreparedMoE
    runner: Runner
    form: ActivationFormat
    exchange: Exchange
    wants: ActFormat = A16
    expert_map: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def on_input(self) -> bool:
        """True when the router's weights multiply the experts' input."""
        return self.prepared.problem.routing.weight_on_input

    def prepare(self, x: Tensor, ids: Tensor, weights: Tensor) -> Dispatched | None:
        """Tokens for modular experts; None when no rank has any."""
        rows, sent = len(x), self.exchange.rows_to_send(len(x), x.device)
        if not sent:
            return None
        if self.on_input and self.wants != A16:
            # top_k is 1 here (checked by FusedMoEKernel), so only the product is needed.
            x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        tokens = self._gathered(x, sent)
        ids = self._local(self.exchange.gather(ids, sent, NO_EXPERT))
        weights = self.exchange.gather(weights, sent, 0)
        if self.form is not ActivationFormat.BATCHED:
            return Dispatched(self._tiled(tokens), rows, ids, weights)
        problem = self.prepared.problem
        batches = batches_of(ids, problem.local_experts, len(ids), problem.experts)
        factors = weights if self.on_input else None
        return Dispatched(self._tiled(_spread(tokens, batches, factors)), rows, ids, weights, batches=batches)

    def prepare_logits(self, x: Tensor, logits: Tensor) -> Dispatched | None:
        """Tokens for monolithic experts; None when no rank has any.

        Padding rows have logits of zero: they are routed like tokens, and their results are dropped.
        """
        sent = self.exchange.rows_to_send(len(x), x.device)
        if not sent:
            return None
        tokens = self._tiled(self._gathered(x, sent))
        return Dispatched(tokens, len(x), logits=self.exchange.gather(logits, sent, 0))

    def finalize(self, y: Tensor, call: Dispatched, dtype: torch.dtype) -> Tensor:
        """``[rows, hidden]`` in `dtype`; ranks' partial results are summed in it as well."""
        if call.batches is not None or not (self.runner.applies_router_weights or call.logits is not None):
            y = self._weighed(y, call)
        return self.exchange.combine(y.to(dtype), call.rows)

    def _gathered(self, x: Tensor, sent: int) -> Tensor | QuantizedTokens:
        if self.wants == A16:
            return self.exchange.gather(x, sent, 0)
        own = quantize(x, self.wants, self.input_scale)
        values = self.exchange.gather(own.values, sent, 0)
        return QuantizedTokens(values, self.exchange.gather(own.scales, sent, 0), own.format)

    def _local(self, ids: Tensor) -> Tensor:
        if self.expert_map is None:
            return ids
        valid = (ids >= 0) & (ids < len(self.expert_map))
        return torch.where(valid, self.expert_map[torch.where(valid, ids, 0).long()], NO_EXPERT)

    def _tiled(self, tokens: Tensor | QuantizedTokens) -> Tensor | QuantizedTokens:
        if not self.runner.tiled or isinstance(tokens, Tensor):
            return tokens
        return QuantizedTokens(tokens.values, in_tiles(tokens.scales), tokens.format)

    def _weighed(self, y: Tensor, call: Dispatched) -> Tensor:
        """``[all rows, hidden]`` fp32: each token's sum over its experts, in the order of its choices."""
        assert call.ids is not None and call.weights is not None
        valid = (call.ids >= 0) & (call.ids < self.prepared.problem.local_experts)
        total = torch.zeros(len(call.ids), y.shape[-1], dtype=torch.float32, device=y.device)
        for choice in range(call.ids.shape[1]):
            part = y[:, choice] if call.batches is None else call.batches.rows_of_choice(y, choice)
            part = part.float() if self.on_input else part * call.weights[:, choice, None]
            # Rows of no expert are undefined, and may be NaN.
            total += torch.where(valid[:, choice, None], part, 0.0)
        return total

    def workspace(self, tokens: int) -> int:
        """Upper bound in bytes on what these steps allocate in a call of `tokens`, without the experts."""
        problem = self.prepared.problem
        all_rows = tokens * self.exchange.ranks
        wide = problem.dims.hidden * 4
        beside = problem.experts * 4 if self.form is ActivationFormat.MONOLITHIC else problem.top_k * 8
        need = SMALLEST
        if self.wants != A16:
            need += 5 * tokens * wide + 2 * all_rows * wide // 4
        if self.exchange.ranks > 1:
            need += (tokens + 2 * all_rows) * (wide // 2 + beside) + all_rows * wide
        elif self.expert_map is not None:
            need += all_rows * problem.top_k * 32
        if self.form is ActivationFormat.BATCHED:
            need += 2 * (problem.local_experts * all_rows + 1) * wide // 2
            need += all_rows * problem.top_k * 96 + problem.local_experts * 32
        if self.form is ActivationFormat.BATCHED or not self.runner.applies_router_weights:
            need += 4 * all_rows * wide
        return need


SMALLEST = 16 << 10
"""Allowance in bytes for small tensors."""


def _spread(
    tokens: Tensor | QuantizedTokens, batches: ExpertMajorBatches, factors: Tensor | None
) -> Tensor | QuantizedTokens:
    if isinstance(tokens, Tensor):
        return batches.scatter(tokens, factors)
    return QuantizedTokens(batches.scatter(tokens.values), batches.scatter(tokens.scales), tokens.format)
