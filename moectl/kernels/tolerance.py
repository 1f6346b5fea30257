"""How far a layer result may be from the reference, and the comparison itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NoBackend, UsageError
from ..problem.moe_problem import MoEProblem
from ..problem.number_formats import NUMBER_FORMATS


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest errors that pass, and where they come from.

    Attributes:
        max: of any element, relative to the RMS of its token's reference row.
        rms: of the whole result, relative to the RMS of the reference.
        reason: where the numbers come from.
    """

    max: float
    rms: float
    reason: str


_HALF_STEP = "bf16 rounding costs 1.7e-3 RMS each time;"
_EXACT = Tolerance(
    0.06, 6e-3, f"{_HALF_STEP} weights are exact, h, y per slot and y are rounded: 2.9e-3, doubled"
)
_ROUNDED = Tolerance(
    0.08, 8e-3, f"{_HALF_STEP} both weights (code * scale), h, y per slot and y: 3.8e-3, doubled"
)

_STEPS = Tolerance(
    0.1, 1e-2, f"{_HALF_STEP} gate and up are rounded too before the activation: 6.3e-3 measured at most"
)

TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("plain", "fp32"): _EXACT,
    ("exact", "fp32"): _EXACT,
    ("rounded", "fp32"): _ROUNDED,
    ("plain", "steps"): _STEPS,
    ("exact", "steps"): _STEPS,
    ("rounded", "steps"): _STEPS,
}
"""(`NumberFormat.decoding` of the weights, accumulation) -> tolerance; ``steps`` accumulates in fp32 too.

Errors of elements are close to normally distributed, so that the largest of 1e8 is about six times the RMS;
`max` is larger because of tokens whose experts' outputs cancel.
"""

DECLARED = "declared"
"""As `accumulation`: fp32 sums of activations that are quantized to the checkpoint's declared format."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A result compared with the reference.

    Attributes:
        max: largest element error relative to the RMS of its token's reference row.
        rms: RMS error of the whole result relative to the RMS of the reference.
        worst_token: token with the largest RMS error relative to its own reference row; -1 without tokens.
        worst_rms: that token's relative RMS error.
        ok: within `tolerance`, and everything finite.
    """

    max: float
    rms: float
    worst_token: int
    worst_rms: float
    tolerance: Tolerance
    ok: bool


def tolerance_for(problem: MoEProblem, accumulation: str = "fp32") -> Tolerance:
    """The tolerance of a result; NoBackend when `TOLERANCES` has no row for it.

    `accumulation` is ``fp32``, or the format of activations that are quantized before they are multiplied
    and summed in fp32: one with a `token_tolerance`, or `DECLARED` for the checkpoint's.
    """
    act = problem.scheme.act.name if accumulation == DECLARED else accumulation
    tokens = NUMBER_FORMATS[act].token_tolerance if act in NUMBER_FORMATS else None
    if tokens is not None:
        exact = tolerance_for(problem)
        return Tolerance(
            exact.max + tokens.max, math.hypot(exact.rms, tokens.rms), f"{tokens.reason}; {exact.reason}"
        )
    if accumulation == DECLARED:
        return tolerance_for(problem)
    weight = problem.scheme.weight.name
    number = NUMBER_FORMATS.get(weight)
    tolerance = TOLERANCES.get((number.decoding, accumulation)) if number else None
    if tolerance is None:
        stated = [
            f"{name}/{sums}"
            for name, known in NUMBER_FORMATS.items()
            for decoding, sums in TOLERANCES
            if decoding == known.decoding
        ]
        raise NoBackend(
            f"no tolerance is stated for {weight} weights with {accumulation} accumulation; "
            f"rows: {', '.join(stated)}"
        )
    return tolerance


def check(y: Tensor, reference: Tensor, tolerance: Tolerance) -> CheckResult:
    """`y` compared with `reference`, both ``[tokens, hidden]``. NaN or infinity in either never passes.

    Raises UsageError when the shapes differ.

    Example:
        >>> reference = torch.ones(2, 4)
        >>> check(reference * 1.001, reference, Tolerance(0.06, 6e-3, "an example")).ok
        True
    """
    if y.shape != reference.shape or y.ndim != 2:
        raise UsageError(f"result and reference differ in shape: {list(y.shape)} and {list(reference.shape)}")
    if not len(y):
        return CheckResult(0.0, 0.0, -1, 0.0, tolerance, True)
    ref = reference.double()
    error = (y.to(ref.device).double() - ref).abs()
    row = ref.square().mean(1).sqrt()
    whole = float(ref.square().mean().sqrt())
    # The error of a row that is nearly zero compared with the others is relative to the whole result.
    scale = row.clamp_min(1e-3 * whole)
    relative = _ratio(error, scale.unsqueeze(1))
    per_token = _ratio(error.square().mean(1).sqrt(), scale)
    finite = bool(torch.isfinite(relative).all()) and bool(torch.isfinite(ref).all())
    worst = int(torch.nan_to_num(per_token, nan=float("inf")).argmax())
    rms = float(_ratio(error.square().mean().sqrt(), ref.new_tensor(whole)))
    largest = float(relative.max())
    ok = finite and largest <= tolerance.max and rms <= tolerance.rms
    return CheckResult(largest, rms, worst, float(per_token[worst]), tolerance, ok)


def _ratio(error: Tensor, scale: Tensor) -> Tensor:
    """error / scale, with 0 / 0 = 0."""
    return torch.where(error == 0, torch.zeros_like(error), error / scale)
