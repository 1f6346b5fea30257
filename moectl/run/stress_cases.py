"""What a layer is stressed with: a table of cases, each making one call's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.layer_inputs import inputs_from
from ..problem.moe_problem import MoEProblem
from ..torch_dtypes import MODEL_TORCH_DTYPES
from .workload import Workload

SOME = 65
"""Tokens of a case that is not about their number: one more than a tile of 64."""

LARGE = {"bf16": 2.0**10, "fp16": 2.0**3}
"""By how much activations are larger than N(0, 1): gated experts square it, and fp16 ends at 65504."""

TINY = {"bf16": 2.0**-20, "fp16": 2.0**-5}
"""Likewise smaller: squares of fp16 numbers below 2^-7 are no normal numbers."""


@dataclass(frozen=True)
class StressInputs:
    """Where cases draw from: the layer's problem, its correction bias, and a seed of their own."""

    problem: MoEProblem
    correction_bias: Tensor | None
    seed: int

    def random(self, tokens: int, columns: int) -> Tensor:
        """``[tokens, columns]`` fp32 of N(0, 1), others for each number of columns."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + columns)
        return torch.randn(tokens, columns, generator=generator)

    def x(self, tokens: int, scale: float = 1.0) -> Tensor:
        """``[tokens, hidden]`` activations in the layer's dtype, N(0, scale)."""
        return (self.random(tokens, self.problem.dims.hidden) * scale).to(
            MODEL_TORCH_DTYPES[self.problem.dtype]
        )

    def logits(self, tokens: int) -> Tensor:
        """``[tokens, experts]`` router logits, N(0, 1)."""
        return self.random(tokens, self.problem.experts)

    def routed(self, x: Tensor, logits: Tensor, bias: Tensor | None = None) -> Workload:
        """`x` routed by `logits`, with the layer's correction bias or with `bias`."""
        bias = self.correction_bias if bias is None else bias
        return Workload(inputs_from(self.problem, x, logits, bias), "random", bias)

    def some(self, tokens: int = SOME, scale: float = 1.0) -> Workload:
        """`tokens` tokens with nothing special about them."""
        return self.routed(self.x(tokens, scale), self.logits(tokens))


@dataclass(frozen=True)
class StressCase:
    """One thing to try.

    Attributes:
        name: in a table.
        about: what is tried, in a few words.
        make: the inputs.
        how: a row of `stress.WAYS`: how it is run.
        by_ids: it lies in ids that no logits lead to, so that kernels which route cannot be asked.
    """

    name: str
    about: str
    make: Callable[[StressInputs], Workload]
    how: str = "once"
    by_ids: bool = False


def _with_ids(made: Workload, ids: Tensor) -> Workload:
    return replace(made, inputs=replace(made.inputs, ids=ids), routed_by="input")


def _empty_experts(draw: StressInputs) -> Workload:
    logits = draw.logits(1).expand(SOME, -1).contiguous()
    return draw.routed(draw.x(SOME), logits)


def _one_expert(draw: StressInputs) -> Workload:
    made = draw.some()
    ids = torch.full_like(made.inputs.ids, -1)
    ids[:, 0] = draw.problem.experts - 1
    return _with_ids(made, ids)


def _ties(draw: StressInputs) -> Workload:
    logits = draw.logits(SOME).round()
    logits[: SOME // 2] = 0
    # A bias would break the ties.
    none = None if draw.correction_bias is None else torch.zeros(draw.problem.experts)
    return draw.routed(draw.x(SOME), logits, none)


def _skipped(draw: StressInputs) -> Workload:
    made = draw.some()
    ids = made.inputs.ids.clone()
    ids.view(-1)[::3] = -1
    ids[1] = -1
    return _with_ids(made, ids)


def _no_ids(draw: StressInputs) -> Workload:
    made = draw.some()
    return _with_ids(made, torch.full_like(made.inputs.ids, -1))


def _zeros(draw: StressInputs) -> Workload:
    return draw.some(scale=0.0)


def _large(draw: StressInputs) -> Workload:
    return draw.some(scale=LARGE[draw.problem.dtype])


def _tiny(draw: StressInputs) -> Workload:
    return draw.some(scale=TINY[draw.problem.dtype])


def _tokens(count: int) -> StressCase:
    def make(draw: StressInputs) -> Workload:
        return draw.some(count)

    return StressCase(f"{count} token{'' if count == 1 else 's'}", "a number that fills no tile", make)


CASES: tuple[StressCase, ...] = (
    StressCase("0 tokens", "an empty batch", lambda draw: draw.some(0)),
    *map(_tokens, (1, 2, 3, 17, 63, 65, 257)),
    StressCase("empty experts", "all tokens on the same experts, none on the others", _empty_experts),
    StressCase("one expert", "all tokens on one expert alone", _one_expert, by_ids=True),
    StressCase("ties", "equal logits: the lower expert id comes first", _ties),
    StressCase("skipped ids", "ids of -1 among others, and alone", _skipped, by_ids=True),
    StressCase("no ids", "ids of -1 alone, which give zeros", _no_ids, by_ids=True),
    StressCase("rank's share", "half of the experts, as a rank has them", StressInputs.some, how="share"),
    StressCase(
        "expert map", "the layer's ids, mapped to every second expert", _skipped, how="map", by_ids=True
    ),
    StressCase(
        "padding", "NaN around the tokens, numbers in the weights' padding", StressInputs.some, how="padding"
    ),
    StressCase("large", "large activations", _large),
    StressCase("tiny", "tiny activations", _tiny),
    StressCase("zeros", "activations of zero", _zeros),
    StressCase(
        "repeated", "the same bits again, with another call between", StressInputs.some, how="repeated"
    ),
)
"""Every case, in the order in which they are run."""
