"""Layers of every kind that the kernels take: all formats with each other choice, every pair of choices once.

Not collected by itself: `test_interpreter` and `test_gpu` run these layers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, product
from typing import Any

from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import FULL, MXFP4, MXFP8, NVFP4, Scheme, WeightFormat, int_format

FORMATS: tuple[WeightFormat, ...] = (
    MXFP4,
    *(
        int_format(bits, group, zero_point=zero)
        for bits, zero, group in product((4, 8), (False, True), (32, 64, 128, FULL))
    ),
    NVFP4,
    MXFP8,
)

CHOICES: Mapping[str, Sequence[Any]] = {
    "weight": FORMATS,
    "floats": tuple(product(("bf16", "fp16"), ("BF16", "F16"))),
    "activation": (
        SILU,
        SWIGLU_OAI,
        Activation("silu", limit=0.75),
        Activation("gelu_tanh"),
        Activation("swiglustep", limit=0.75),
        Activation("situ", beta=0.5, linear_beta=1.5),
        Activation("situ", linear_beta=25.0),
        Activation("relu2", gated=False),
    ),
    "sizes": ((96, 32), (64, 160), (192, 64), (128, 128), (352, 96)),
    "spread": ((1, 1), (4, 2), (9, 6), (24, 22)),
    "bias": (False, True),
    "on_input": (False, True),
    "rows": ("interleaved", "concatenated"),
    "tokens": (1, 3, 17),
    "routing": ("uniform", "skipping", "beyond", "crowded"),
    "launch": (0, 1, 2, 3, 4),
}
"""What a layer and a call are made of. `floats` are the tokens' and the scales'; `spread` is experts and
top-k; `launch` counts the launches that there are, from the first on again."""


@dataclass(frozen=True)
class Case:
    """One choice of each."""

    weight: WeightFormat
    floats: tuple[str, str]
    activation: Activation
    sizes: tuple[int, int]
    spread: tuple[int, int]
    bias: bool
    on_input: bool
    rows: str
    tokens: int
    routing: str
    launch: int

    @property
    def problem(self) -> MoEProblem:
        """The layer, its sizes rounded up to whole groups of weights."""
        dtype, scales = self.floats
        unit = math.lcm(32, max(self.weight.group, 1))
        hidden, intermediate = (math.ceil(size / unit) * unit for size in self.sizes)
        weight = self.weight
        if not weight.number.byte_scale:
            weight = replace(weight, scale_dtype=scales)
        experts, top_k = self.spread
        return MoEProblem(
            Dims(hidden, intermediate),
            experts,
            top_k,
            Scheme(weight),
            self.activation,
            Routing(weight_on_input=self.on_input),
            rows=self.rows if self.activation.gated else "concatenated",
            bias=self.bias,
            dtype=dtype,
        )

    def __str__(self) -> str:
        words = (self.weight, *self.floats, self.activation, self.sizes, self.spread, self.tokens)
        more = (("bias", self.bias), ("on input", self.on_input), (self.rows, True), (self.routing, True))
        return " ".join([*map(str, words), *(str(word) for word, there in more if there)])


def pairwise(choices: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Choices of one of each in which every two values of two names occur together at least once.

    Greedy: each is the best of some random ones that hold a pair which has not occurred.
    """
    draw = random.Random(seed)
    left = {
        (a, i, b, j)
        for a, b in combinations(choices, 2)
        for i in range(len(choices[a]))
        for j in range(len(choices[b]))
    }
    while left:
        a, i, b, j = min(left)
        best: dict[str, int] = {}
        most = 0
        for _ in range(60):
            made = {name: draw.randrange(len(values)) for name, values in choices.items()} | {a: i, b: j}
            new = sum((p, made[p], q, made[q]) in left for p, q in combinations(choices, 2))
            if new > most:
                best, most = made, new
        left -= {(p, best[p], q, best[q]) for p, q in combinations(choices, 2)}
        yield {name: choices[name][index] for name, index in best.items()}


CASES: tuple[Case, ...] = tuple(Case(**made) for made in pairwise(CHOICES))
"""Every two choices occur together."""


def _small(made: Mapping[str, Any], weight: WeightFormat) -> Case:
    case = Case(**{**made, "weight": weight})
    return replace(case, tokens=min(case.tokens, 2), sizes=(96, 32)) if case.spread[1] > 10 else case


FEWER_CASES: tuple[Case, ...] = tuple(
    map(
        _small,
        pairwise({name: values for name, values in CHOICES.items() if name != "weight"}),
        cycle(FORMATS),
    )
)
"""For the interpreter: the formats in turn, and with many choices per token a small layer."""
