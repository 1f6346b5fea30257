"""The stress cases: a table of edge cases, each with a function that makes the inputs of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.layer_inputs import inputs_from
from ..problem.moe_problem import MoEProblem
from ..torch_dtypes import MODEL_TORCH_DTYPES
from .workload import Workload

TOKENS = 65
"""Tokens of cases that do not test their number: one more than a tile of 64."""

LARGE = {"bf16": 2.0**10, "fp16": 2.0**3}
"""Scale of large activations relative to N(0, 1): gated experts square them, and fp16 ends at 65504."""

TINY = {"bf16": 2.0**-20, "fp16": 2.0**-5}
"""Scale of tiny activations: squares of fp16 numbers below 2^-7 are subnormal."""


@dataclass(frozen=True)
class StressInputs:
    """What the inputs of a case depend on: the layer's problem, its correction bias, and the case's seed."""

    problem: MoEProblem
    correction_bias: Tensor | None
    seed: int

    def random(self, tokens: int, columns: int) -> Tensor:
        """``[tokens, columns]`` fp32 of N(0, 1), which differ by the number of columns."""
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

    def ordinary(self, tokens: int = TOKENS, scale: float = 1.0) -> Workload:
        """`tokens` random tokens with random routing."""
        return self.routed(self.x(tokens, scale), self.logits(tokens))


@dataclass(frozen=True)
class StressCase:
    """One edge case.

    Attributes:
        name: name in tables.
        about: what it tests, in a few words.
        make: makes the inputs.
        how: how it is run, a key of `stress.WAYS`.
        by_ids: whether no logits give its ids, so that it does not apply to kernels that route.
        scaled: whether its activations have another magnitude than ordinary ones, which static scales of
            activations may not hold.
    """

    name: str
    about: str
    make: Callable[[StressInputs], Workload]
    how: str = "once"
    by_ids: bool = False
    scaled: bool = False


def _with_ids(workload: Workload, ids: Tensor) -> Workload:
    return replace(workload, inputs=replace(workload.inputs, ids=ids), routed_by="input")


def _empty_experts(source: StressInputs) -> Workload:
    logits = source.logits(1).expand(TOKENS, -1).contiguous()
    return source.routed(source.x(TOKENS), logits)


def _one_expert(source: StressInputs) -> Workload:
    workload = source.ordinary()
    ids = torch.full_like(workload.inputs.ids, -1)
    ids[:, 0] = source.problem.experts - 1
    return _with_ids(workload, ids)


def _ties(source: StressInputs) -> Workload:
    logits = source.logits(TOKENS).round()
    logits[: TOKENS // 2] = 0
    # A bias would break the ties.
    no_bias = None if source.correction_bias is None else torch.zeros(source.problem.experts)
    return source.routed(source.x(TOKENS), logits, no_bias)


def _skipped(source: StressInputs) -> Workload:
    workload = source.ordinary()
    ids = workload.inputs.ids.clone()
    ids.view(-1)[::3] = -1
    ids[1] = -1
    return _with_ids(workload, ids)


def _no_ids(source: StressInputs) -> Workload:
    workload = source.ordinary()
    return _with_ids(workload, torch.full_like(workload.inputs.ids, -1))


def _zeros(source: StressInputs) -> Workload:
    return source.ordinary(scale=0.0)


def _large(source: StressInputs) -> Workload:
    """Large activations. An activation function with a limit maps nearly all of them to it, and the rest
    depends on how tokens are rounded: signs of one magnitude are exact in every format of tokens."""
    scale, problem = LARGE[source.problem.dtype], source.problem
    if not problem.activation.limit or problem.scheme.act.bits == 16:
        return source.ordinary(scale=scale)
    return source.routed(source.x(TOKENS).sign() * scale, source.logits(TOKENS))


def _tiny(source: StressInputs) -> Workload:
    return source.ordinary(scale=TINY[source.problem.dtype])


def _tokens(count: int) -> StressCase:
    def make(source: StressInputs) -> Workload:
        return source.ordinary(count)

    return StressCase(f"{count} token{'' if count == 1 else 's'}", "a partial tile", make)


CASES: tuple[StressCase, ...] = (
    StressCase("0 tokens", "an empty batch", lambda source: source.ordinary(0)),
    *map(_tokens, (1, 2, 3, 17, 63, 65, 257)),
    StressCase("empty experts", "all tokens on the same experts, none on the others", _empty_experts),
    StressCase("one expert", "all tokens on a single expert", _one_expert, by_ids=True),
    StressCase("ties", "equal logits: the lower expert id comes first", _ties),
    StressCase("skipped ids", "ids of -1 among others, and a token with only -1", _skipped, by_ids=True),
    StressCase("no ids", "only ids of -1, which give zeros", _no_ids, by_ids=True),
    StressCase(
        "rank's share",
        "half of the experts, as on an expert-parallel rank",
        StressInputs.ordinary,
        how="share",
    ),
    StressCase(
        "expert map", "the layer's ids, mapped to every second expert", _skipped, how="map", by_ids=True
    ),
    StressCase(
        "padding",
        "NaN around the tokens, numbers in the weights' padding",
        StressInputs.ordinary,
        how="padding",
    ),
    StressCase("large", "large activations", _large, scaled=True),
    StressCase("tiny", "tiny activations", _tiny, scaled=True),
    StressCase("zeros", "activations of zero", _zeros),
    StressCase(
        "repeated",
        "bitwise equal results, with another call in between",
        StressInputs.ordinary,
        how="repeated",
    ),
)
"""All cases, in the order in which they are run."""
