"""Options of quantization."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UsageError
from ...problem.schemes import WeightFormat
from ..codecs import E8M0_RULES

METHODS = ("search", "rtn", "gptq")
"""How codes and scales are chosen, the default first.

``rtn`` takes the format's usual scale and rounds to nearest; ``search`` takes the scale with the smallest
squared error for every block, weighted by activations if given; ``gptq`` searches scales one column group at
a time and compensates for the error of earlier columns in later ones (Frantar et al., 2022).
"""


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How weights are quantized.

    Attributes:
        weight: the format.
        method: one of `METHODS`.
        rule: the usual scale of formats with power-of-two scales, one of `E8M0_RULES`.
        damping: added by ``gptq`` to the diagonal of a Hessian, as a fraction of its mean.
    """

    weight: WeightFormat
    method: str = METHODS[0]
    rule: str = "floor"
    damping: float = 0.01

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"no quantizer is called {self.method!r}; choose one of {', '.join(METHODS)}.")
        if self.rule not in E8M0_RULES:
            raise UsageError(
                f"no rule for scales is called {self.rule!r}; choose one of {', '.join(E8M0_RULES)}."
            )
        if not 0 < self.damping <= 1:
            raise UsageError(f"damping must be above 0 and at most 1, got {self.damping}.")
